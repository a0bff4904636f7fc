package redisconn

import (
	"net"
	"net/url"
	"strings"

	"github.com/redis/go-redis/v9"

	"headcount/internal/setting"
)

// CheckURL returns the problem with a Redis URL and its remedy, or an empty string. It does not connect. It quotes only
// names of options, because a URL that cannot be parsed may have a password anywhere.
func CheckURL(raw string) (problem string) {
	u, err := url.Parse(raw)
	// Everything that is left of the parse error may contain the password, so the text is ours alone.
	if err != nil || u.Scheme != "redis" && u.Scheme != "rediss" || u.Hostname() == "" || u.Fragment != "" {
		return "not a Redis URL; write redis://[user:password@]host[:port][/database] (rediss:// for TLS), " +
			"with special characters of the password percent-encoded"
	}

	// url.Parse takes any number as a port.
	if p := u.Port(); p != "" {
		if _, _, err := setting.SplitAddress(net.JoinHostPort("h", p)); err != nil {
			return "the port of the URL is not a number from 0 to 65535; correct it"
		}
	}

	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "the options after ? do not parse; percent-encode special characters"
	}

	for _, addr := range query["addr"] {
		host, port, err := setting.SplitAddress(addr)
		if err != nil || host == "" || port == 0 {
			return "an addr= in the URL is no address; write addr=host:port"
		}
	}

	// Only whether the URL parses counts. The errors of go-redis may quote it, with the password.
	switch {
	case query.Has("master_name"):
		if query.Get("master_name") == "" {
			return "master_name= in the URL is empty; name the master the Sentinels watch"
		}
		_, err = redis.ParseFailoverURL(raw)
	case query.Has("addr"):
		if db := strings.Trim(u.Path, "/"); db != "" && db != "0" {
			return "a cluster has only database 0; leave the path of the URL out"
		}
		_, err = redis.ParseClusterURL(raw)
	default:
		_, err = redis.ParseURL(raw)
	}

	if err != nil {
		return "the database or an option after ? of the URL is wrong; the path is a database number, " +
			"and the options are those of go-redis"
	}

	return ""
}
