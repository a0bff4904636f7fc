package main

import (
	"cmp"
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
	// Without a path, the only slashes are those before the host.
	isOrigin := setting.IsWebURL(c.PublicURL) && strings.Count(strings.TrimRight(c.PublicURL, "/"), "/") == 2
	if c.PublicURL != "" && !isOrigin {
		return setting.Errorf("public-url", "it is not an http or https URL without a path; write the address "+
			"that visitors open, such as https://count.example.com")
	}
	c.PublicURL = asSent(c.PublicURL)

	return c.Config.Validate()
}

// asSent returns a URL with its host as browsers send it and certificates have it.
func asSent(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return address
	}

	// Anything else, such as an IP address, is sent as it is.
	name, ok := setting.HostName(u.Hostname())
	if !ok {
		return address
	}

	port := strings.TrimPrefix(u.Host, u.Hostname()) // with its colon
	u.Host = name + port

	return u.String()
}

// errFaults is the result of a check that found problems.
var errFaults = errors.New("something is wrong")

// findings writes the results of a check.
type findings struct {
	out    io.Writer
	server string // admin URL of a server that runs with these settings; empty: none does
	result error  // errFaults, if there is a problem
}

// say writes a line for each error that is a problem of the thing or, if there is none, that it is fine. A refused
// setting is a line of its own name, wherever it was found.
func (f *findings) say(thing, fine string, problems ...error) {
	problems = slices.DeleteFunc(problems, func(problem error) bool { return problem == nil })
	for _, problem := range problems {
		f.wrong(thing, problem)
	}

	if len(problems) == 0 {
		fmt.Fprintf(f.out, "fine   %s: %s\n", thing, fine)
	}
}

// wrong writes a problem of a thing as one sentence on one line.
func (f *findings) wrong(thing string, problem error) {
	f.result = errFaults
	text := strings.TrimPrefix(problem.Error(), thing+": ")
	if refused := refusal(problem); refused != nil {
		thing, text, _ = strings.Cut(refused.Error(), ": ")
	}

	oneLine := strings.Join(strings.Fields(text), " ")
	fmt.Fprintf(f.out, "wrong  %s: %s.\n", thing, strings.TrimSuffix(oneLine, "."))
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

	admin := adminURL(c.Config.AdminListen)
	status, body, err := probe.Ask(ctx, c.Patience, http.MethodGet, admin+"/healthz", nil)
	if err == nil && status == http.StatusOK && strings.TrimSpace(body) == "ok" {
		f.server = admin
	}

	look := func(given bool, check func(context.Context, *findings)) {
		if given {
			check(ctx, f)
		}
	}
	look(f.server != "", c.checkServer)
	look(f.server == "", c.checkAddresses)
	look(c.Config.DataDir != "", c.checkDataDir)
	look(c.Config.Redis != "", c.checkRedis)
	look(c.Config.Postgres != "", c.checkPostgres)
	look(c.Config.JWKSURL != "", c.checkKeys)
	c.checkReceivers(ctx, f)
	c.checkCertificates(ctx, f)
	look(c.PublicURL != "", c.checkProxy)

	return f.result
}

// checkServer asks the server that runs whether it is ready.
func (c *checkCommand) checkServer(ctx context.Context, f *findings) {
	status, body, err := probe.Ask(ctx, c.Patience, http.MethodGet, f.server+"/readyz", nil)
	if err == nil && status != http.StatusOK {
		err = errors.New("it runs and is " + body)
	}

	f.say("server", "it runs, and is ready.", err)
}

// checkAddresses opens the addresses as the server does.
func (c *checkCommand) checkAddresses(ctx context.Context, f *findings) {
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

// checkDataDir writes to the directory, and reads its files through.
func (c *checkCommand) checkDataDir(_ context.Context, f *findings) {
	dir := c.Config.DataDir
	f.say("--data-dir", dir+" can be written.", boltfile.CheckDir(dir))

	files, _ := filepath.Glob(filepath.Join(dir, "*.db")) // a name that is no pattern has none
	for _, path := range files {
		err := boltfile.Check(path, nil)
		// The server that runs has its files open.
		if f.server == "" || !errors.Is(err, boltfile.ErrInUse) {
			f.say("--data-dir", path+" can be read through.", err)
		}
	}

	if c.Config.Postgres != "" {
		if hidden := refusal(noCountersIn(dir)); hidden != nil {
			f.wrong("--data-dir", hidden)
		}
	}
}

// checkRedis checks the Redis of this region and of the others.
func (c *checkCommand) checkRedis(ctx context.Context, f *findings) {
	// Only a gateway opens the key of user hashes.
	var idKeys [][]byte
	if c.Config.HasRole(presence.RoleGateway) {
		idKeys = c.Config.IDKeys()
	}

	ask := func(url string, facts presenceredis.Facts, idKeys [][]byte) presenceredis.Checked {
		ctx, cancel := context.WithTimeout(ctx, c.Patience)
		defer cancel()

		conn := redisconn.Config{URL: url, Dial: c.Patience, Log: zerolog.Nop()}
		return presenceredis.Check(ctx, conn, facts, idKeys)
	}

	found := ask(c.Config.Redis, factsOf(&c.Config), idKeys)
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
		found := ask(link, presenceredis.Facts{Region: name, Counters: cluster.Format}, nil)
		f.say("--peer "+name, "its Redis answers as "+cmp.Or(found.Region, "no region yet")+".", found.Problems...)
	}
}

// checkPostgres checks --postgres, and what the table of pages needs beyond it.
func (c *checkCommand) checkPostgres(ctx context.Context, f *findings) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	found, err := routed.Check(ctx, c.Config.Postgres, placeOf(&c.Config).Use())
	f.say("--postgres", "it answers, may be changed, and has the right time.", append(found.Problems, err)...)
	if found.AdminSQL != "" {
		const cannot = "applications cannot call headcount.change in SQL unless an administrator does: "
		f.say("--postgres", cannot+found.AdminSQL+".")
	}

	isAway := err != nil && refusal(err) == nil
	if len(c.Config.PagesTable) > 0 && !isAway {
		_, err = postgres.Check(ctx, c.Config.Postgres, pagestable.Tables(), nil)
		f.say("--pages-table", "headcount_pages is, or can be made, as the server needs it.", err)
	}
}

// checkKeys fetches --jwks-url as the server does.
func (c *checkCommand) checkKeys(_ context.Context, f *findings) {
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

// checkCertificates checks the files of --tls-cert, the place of those of --domain, and what the public address shows.
func (c *checkCommand) checkCertificates(ctx context.Context, f *findings) {
	if c.Config.ACMEDir != "" && len(c.Config.Domains) > 0 {
		f.say("--acme-dir", c.Config.ACMEDir+" can be written.", boltfile.CheckDir(c.Config.ACMEDir))
	}

	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	host, shown := certificates.Of(ctx, c.PublicURL)
	if len(shown) > 0 {
		fine := fmt.Sprintf("its certificate is for %s, and good until %s.", host, certificates.Day(shown[0].NotAfter))
		f.say("--public-url", fine, certificates.Check(shown, host, nil, time.Now()))
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
	err = certificates.CheckAge(leaf, time.Now())
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
	way := probe.Proxy{
		URL: c.PublicURL, BasePath: c.Config.BasePath, Admin: f.server, Patience: c.Patience,
		Tokens: c.Config.JWTSecret != "" || c.Config.JWKSURL != "",
	}

	f.say("--public-url", "the proxy passes on what it should.", way.Check(ctx)...)
}
