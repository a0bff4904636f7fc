package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/cmd/headcount/certificates"
	"headcount/cmd/headcount/config"
	"headcount/cmd/headcount/probe"
	"headcount/counter/cluster"
	"headcount/counter/routed"
	"headcount/gateway/identity"
	"headcount/internal/boltfile"
	"headcount/internal/postgres"
	"headcount/internal/redisconn"
	"headcount/internal/setting"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/pagestable"
	"headcount/presence/presenceredis"
	"headcount/presence/region"
	"headcount/webhook"
)

// checkCommand reports problems that keep a server with these settings from working. It does everything that serve does
// before it serves, with the same functions: it opens the addresses and reads the certificates. It also tries the
// services that the server would use, and the server itself through its proxy. It leaves nothing changed.
type checkCommand struct {
	ConfigFile string        `name:"config" type:"text" placeholder:"FILE" help:"A file with a JSON object of settings, as serve reads it."`
	PublicURL  string        `type:"text" placeholder:"URL" help:"The address at which visitors reach the server, through its proxy, such as https://count.example.com. With it and a running server the proxy is checked, too."`
	Patience   time.Duration `type:"span" placeholder:"TIME" default:"5s" help:"How long to wait for each answer."`
	Config     config.Server `embed:""`
}

// AfterApply is called when the settings are read.
func (c *checkCommand) AfterApply() error {
	if c.PublicURL != "" {
		u, err := url.Parse(c.PublicURL)
		isOrigin := err == nil && setting.IsWebURL(c.PublicURL) && strings.Trim(u.Path, "/") == ""
		if !isOrigin {
			return setting.Errorf("public-url", "it is not an http or https URL without a path; write the address "+
				"that visitors open, such as https://count.example.com")
		}
	}

	return c.Config.Validate()
}

// errFaults is the result of a check that found problems.
var errFaults = errors.New("something is wrong")

// findings writes the results of a check.
type findings struct {
	out  io.Writer
	runs bool // a server with these settings
	bad  bool // there is a problem
}

// say writes a line for each error that is a problem of the thing or, if there is none, that it is fine. A refused
// setting is a line of its own name, wherever it was found.
func (f *findings) say(thing, fine string, problems ...error) {
	isFine := true
	for _, problem := range problems {
		if problem == nil {
			continue
		}

		isFine = false
		f.wrong(thing, problem)
	}

	if isFine {
		fmt.Fprintf(f.out, "fine   %s: %s\n", thing, fine)
	}
}

// wrong writes a problem of a thing as one sentence on one line.
func (f *findings) wrong(thing string, problem error) {
	f.bad = true
	text := problem.Error()
	if refused := refusal(problem); refused != nil {
		thing, text, _ = strings.Cut(refused.Error(), ": ")
	}

	text = strings.Join(strings.Fields(strings.TrimPrefix(text, thing+": ")), " ")
	fmt.Fprintf(f.out, "wrong  %s: %s.\n", thing, strings.TrimSuffix(text, "."))
}

// run writes a line for each thing that it checked. It returns errFaults if there are problems. A line "open" is no
// problem: the access may be intended.
func (c *checkCommand) run(ctx context.Context, out io.Writer) error {
	f := &findings{out: out}
	f.say("settings", "they can be read, and fit together.")
	for _, warning := range c.Config.Warnings() {
		f.wrong("settings", errors.New(warning))
	}
	for _, open := range c.Config.Open() {
		fmt.Fprintf(out, "open   settings: %s.\n", open)
	}

	status, body, err := c.admin(ctx, "/healthz")
	f.runs = err == nil && status == http.StatusOK && strings.TrimSpace(body) == "ok"

	for _, look := range []func(context.Context, *findings){
		c.checkAddresses, c.checkDirs, c.checkRedis, c.checkPostgres, c.checkPagesTable, c.checkKeys, c.checkReceivers,
		c.checkCertificates, c.checkProxy,
	} {
		look(ctx, f)
	}

	if f.bad {
		return errFaults
	}

	return nil
}

// admin asks the server at the admin address.
func (c *checkCommand) admin(ctx context.Context, path string) (status int, body string, err error) {
	return probe.Ask(ctx, c.Patience, http.MethodGet, adminURL(c.Config.AdminListen)+path, nil)
}

// checkAddresses opens the addresses as the server does. If the server runs, it asks the server whether it is ready.
func (c *checkCommand) checkAddresses(ctx context.Context, f *findings) {
	if f.runs {
		status, body, err := c.admin(ctx, "/readyz")
		if err != nil {
			err = fmt.Errorf("it runs, and does not say whether it is ready: %w", err)
		} else if status != http.StatusOK {
			err = fmt.Errorf("it runs and is %s", body)
		}
		f.say("server", "it runs, and is ready.", err)

		return
	}

	for _, a := range c.Config.Addresses() {
		fine := a.Addr + " is free."
		l, err := listen(ctx, a)
		if err != nil {
			f.wrong("--"+a.Flag, err)
			continue
		}

		// Nobody can dial a port that the system has yet to choose.
		advertised := c.Config.AdvertiseAddr()
		if l.udp != nil && !strings.HasSuffix(advertised, ":0") {
			fine = fmt.Sprintf("%s is free, and TCP and UDP to %s lead to it.", a.Addr, advertised)
			err = heartbeat.CheckName(ctx, c.Patience, l.udp, advertised, c.Config.ClusterKeys())
		}
		if err != nil {
			err = setting.Errorf("advertise", "other processes would dial %s, which %v; or give the address at which "+
				"they reach --cluster-listen", advertised, err)
		}
		f.say("--"+a.Flag, fine, err)
		l.close()
	}
}

func (c *checkCommand) checkDirs(_ context.Context, f *findings) {
	for _, d := range []struct{ thing, dir string }{
		{"--data-dir", c.Config.DataDir}, {"--acme-dir", c.Config.ACMEDir},
	} {
		isUsed := d.dir != "" && (d.thing == "--data-dir" || len(c.Config.Domains) > 0)
		if !isUsed {
			continue
		}

		f.say(d.thing, d.dir+" can be written.", boltfile.CheckDir(d.dir))
	}

	if c.Config.DataDir == "" {
		return
	}

	files, _ := filepath.Glob(filepath.Join(c.Config.DataDir, "*.db")) // a name that is no pattern has none
	for _, path := range files {
		err := boltfile.Check(path, nil)
		isServed := f.runs && errors.Is(err, boltfile.ErrInUse) // by the server itself
		if !isServed {
			f.say("--data-dir", path+" can be read through.", err)
		}
	}

	if c.Config.Postgres != "" {
		err := noCountersIn(c.Config.DataDir)
		if errors.As(err, new(*setting.Error)) {
			f.wrong("--data-dir", err)
		}
	}
}

// checkRedis checks the Redis of this region and of the others.
func (c *checkCommand) checkRedis(ctx context.Context, f *findings) {
	if c.Config.Redis == "" {
		return
	}

	// Only a gateway opens the key of user hashes.
	var idKeys [][]byte
	if c.Config.HasRole(presence.RoleGateway) {
		idKeys = c.Config.IDKeys()
	}

	found := c.redis(ctx, c.Config.Redis, factsOf(&c.Config), idKeys)
	f.say("--redis", "it answers, permits what is needed, and has the right time.", found.Problems...)

	for _, p := range found.Processes {
		if p.Name == c.Config.AdvertiseAddr() {
			continue
		}

		err := heartbeat.Reach(ctx, c.Patience, p.Name, c.Config.ClusterKeys())
		if err != nil {
			err = fmt.Errorf("%s has a lease, and %w", p.Name, err)
		}
		f.say("processes", p.Name+" is reached over TCP and UDP.", err)
	}

	// Whatever keeps a server from Redis keeps the owners from being read, and has been said.
	if len(found.Problems) == 0 {
		owned, err := cluster.Owners(ctx, c.Config.Redis, found.Processes)
		for _, process := range slices.Sorted(maps.Keys(owned)) {
			f.say("counters", fmt.Sprintf("%s owns %d of %d partitions.", process, owned[process], cluster.Partitions))
		}
		if err != nil {
			f.wrong("counters", err)
		}
	}

	for _, peer := range c.Config.Peers {
		name, link := region.SplitPeer(peer)
		facts := presenceredis.Facts{Region: name, Counters: cluster.Format}
		found := c.redis(ctx, link, facts, nil)

		fine := "its Redis answers, and belongs to the region."
		if found.Region == "" {
			fine = "its Redis answers; none of its processes has run yet."
		}
		f.say("--peer "+name, fine, found.Problems...)
	}
}

// redis checks a Redis as a process with those facts would use it.
func (c *checkCommand) redis(
	ctx context.Context, url string, facts presenceredis.Facts, idKeys [][]byte,
) presenceredis.Checked {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	conn := redisconn.Config{URL: url, Dial: c.Patience, Log: zerolog.Nop()}

	return presenceredis.Check(ctx, conn, facts, idKeys)
}

func (c *checkCommand) checkPostgres(ctx context.Context, f *findings) {
	if c.Config.Postgres == "" {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	found, err := routed.Check(ctx, c.Config.Postgres, placeOf(&c.Config).Use())
	f.say("--postgres", "it answers, may be changed, and has the right time.", append(found.Problems, err)...)
	if found.AdminSQL != "" {
		f.say("--postgres", "applications cannot call headcount.change in SQL unless an administrator does: "+
			found.AdminSQL+".")
	}
}

// checkPagesTable checks what the table of pages needs beyond --postgres.
func (c *checkCommand) checkPagesTable(ctx context.Context, f *findings) {
	if len(c.Config.PagesTable) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	_, err := postgres.Check(ctx, c.Config.Postgres, pagestable.Tables(), nil)
	if err == nil || refusal(err) != nil { // else --postgres says why
		f.say("--pages-table", "headcount_pages is, or can be made, as the server needs it.", err)
	}
}

// checkKeys fetches --jwks-url as the server does.
func (c *checkCommand) checkKeys(_ context.Context, f *findings) {
	if c.Config.JWKSURL == "" {
		return
	}

	usable, err := identity.CheckKeys(c.Config.JWKSURL)
	f.say("--jwks-url", fmt.Sprintf("it has %d keys.", usable), err)
}

// checkReceivers checks in parallel that the receivers of --webhook can be reached. It sends them no event.
func (c *checkCommand) checkReceivers(ctx context.Context, f *findings) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	problems := make([]error, len(c.Config.Hooks))
	var asked sync.WaitGroup
	for i, hook := range c.Config.Hooks {
		asked.Go(func() { problems[i] = webhook.Check(ctx, hook) })
	}
	asked.Wait()

	for i, hook := range c.Config.Hooks {
		f.say(fmt.Sprintf("--webhook, number %d", i+1), hook.Host+" answers. No event was sent to it.", problems[i])
	}
}

// checkCertificates checks the files of --tls-cert, and the certificates of the public address.
func (c *checkCommand) checkCertificates(ctx context.Context, f *findings) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	now := time.Now()
	host, shown := certificates.Of(ctx, c.PublicURL)
	if len(shown) > 0 {
		fine := fmt.Sprintf("its certificate is for %s, and good until %s.", host, certificates.Day(shown[0].NotAfter))
		f.say("--public-url", fine, certificates.Check(shown, host, nil, now))
	}

	if c.Config.TLSCert == "" {
		return
	}

	opened, err := openCertificates(&c.Config, zerolog.Nop())
	if err != nil {
		f.wrong("--tls-cert", err)
		return
	}

	// What the public address shows is checked there, by the name under which visitors come.
	leaf := opened.Shown()[0].Leaf
	err = certificates.CheckAge(leaf, now)
	if err == nil && len(shown) == 0 && host != "" {
		err = certificates.CheckName(leaf, host)
	}

	isReported := err != nil && len(shown) > 0 && shown[0].Equal(leaf) // of the public address
	if !isReported {
		f.say("--tls-cert", "it fits its key, and is good until "+certificates.Day(leaf.NotAfter)+".", err)
	}
}

// checkProxy asks the server through its proxy.
func (c *checkCommand) checkProxy(ctx context.Context, f *findings) {
	if c.PublicURL == "" {
		return
	}

	way := probe.Proxy{
		URL: c.PublicURL, BasePath: c.Config.BasePath, Patience: c.Patience,
		Tokens: c.Config.JWTSecret != "" || c.Config.JWKSURL != "",
	}
	if f.runs {
		way.Admin = adminURL(c.Config.AdminListen)
	}

	f.say("--public-url", "the proxy passes on what it should.", way.Check(ctx)...)
}
