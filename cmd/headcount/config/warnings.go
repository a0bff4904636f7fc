package config

import (
	"fmt"
	"slices"
	"strings"

	"headcount/internal/postgres"
	"headcount/internal/setting"
	"headcount/presence"
)

// Warnings returns sentences about settings that work but are unsafe.
func (c *Server) Warnings() []string {
	const minSecret = 16 // bytes; a shorter secret can be guessed from one signature
	short := func(s string) bool { return s != "" && len(s) < minSecret }

	// The name of a site before a key would make a short key long.
	var keys []string
	for _, key := range c.APIKeys {
		_, key = c.AllSites.SplitKey(key)
		keys = append(keys, key)
	}

	var out []string
	for _, s := range []struct {
		flag   string
		values []string
	}{{"cluster-secret", c.ClusterSecrets}, {"id-secret", c.IDSecrets}, {"jwt-secret", []string{c.JWTSecret}},
		{"api-key", keys},
		{"pusher-secret", c.PusherSecrets}} {
		if slices.ContainsFunc(s.values, short) {
			out = append(out, fmt.Sprintf("--%s is shorter than %d bytes and can be guessed; give a long random "+
				"value", s.flag, minSecret))
		}
	}

	// Not refused: issuers may sign with exactly these bytes.
	if strings.TrimSpace(c.JWTSecret) != c.JWTSecret {
		out = append(out, "--jwt-secret begins or ends with white space, such as a newline; tokens signed with and "+
			"without it are taken: remove it")
	}

	padded := func(key string) bool { return strings.TrimSpace(key) != key }
	if slices.ContainsFunc(keys, padded) {
		out = append(out, "--api-key begins or ends with white space, such as a newline, which no header can; it "+
			"is ignored: remove it")
	}

	// The key of a site that was renamed or taken away would silently open all others. It is no refusal, because a key
	// may have a colon of its own, and its beginning is not shown, because it may be a part of the secret.
	ofNoSite := func(written string) bool {
		site, _ := c.AllSites.SplitKey(written)
		return site == nil && strings.Contains(written, ":")
	}
	if len(c.Sites) > 0 && slices.ContainsFunc(c.APIKeys, ofNoSite) {
		out = append(out, "--api-key has a colon behind what is the name of no --site, so the whole of it is a key "+
			"for all sites; if it is meant for one, write that site's name, or remove it")
	}

	for _, name := range postgres.Ignored(c.Postgres) {
		out = append(out, "--postgres has ?"+name+"=, which only Prisma knows; it is ignored")
	}

	for _, name := range c.Strangers {
		out = append(out, name+" is not the variable of any setting and is ignored; remove it, or see headcount "+
			"serve --help")
	}

	return out
}

// Open returns sentences about parts of this process that every client that reaches it may use, which may be intended.
func (c *Server) Open() (out []string) {
	// On the loopback only this machine is meant, as when somebody tries the server out.
	if c.HasRole(presence.RoleGateway) && len(c.APIKeys) == 0 && !setting.IsLoopback(c.Listen) {
		out = append(out, "--api-key is not set and other machines reach --listen: everybody may read the "+
			"dashboard, and none of your servers may call; give a long random value")
	}

	if c.JWKSURL != "" && len(c.JWTIssuers) == 0 && len(c.JWTAudiences) == 0 {
		out = append(out, "--jwks-url is given without --jwt-issuer and --jwt-audience: a token that its keys have "+
			"signed for any other application is taken, too; give what yours have")
	}

	if !setting.IsLoopback(c.AdminListen) {
		out = append(out, "--admin-listen can be reached from other machines, with metrics and profiles; make sure "+
			"that only operators can reach it")
	}

	return out
}
