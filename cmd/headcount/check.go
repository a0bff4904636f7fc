package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
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

// wrongf reports a problem of a thing, in a sentence.
func (f *findings) wrongf(thing, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	f.bad = true
	fmt.Fprintf(f.out, "wrong  %s: %s.\n", thing, strings.TrimSuffix(oneLine(text), "."))
}

// wrong reports a problem that the server has, too. Its text begins with the flag.
func (f *findings) wrong(err error) {
	thing, text, _ := strings.Cut(err.Error(), ": ")
	f.wrongf(thing, "%s", text)
}

func (f *findings) finef(thing, format string, args ...any) {
	fmt.Fprintf(f.out, "fine   %s: %s\n", thing, fmt.Sprintf(format, args...))
}

// oneLine returns a text on one line.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// run writes a line for each thing that it checked. It returns errFaults if there are problems. A line "open" is no
// problem: the access may be intended.
func (c *checkCommand) run(ctx context.Context, out io.Writer) error {
	f := &findings{out: out}
	f.finef("settings", "they can be read, and fit together.")
	for _, warning := range c.Config.Warnings() {
		f.wrongf("settings", "%s", warning)
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
		switch {
		case err != nil:
			f.wrongf("server", "it runs, and does not say whether it is ready: %v", err)
		case status != http.StatusOK:
			f.wrongf("server", "it runs and is %s", body)
		default:
			f.finef("server", "it runs, and is ready.")
		}

		return
	}

	for _, a := range c.Config.Addresses() {
		l, err := listen(ctx, a)
		if err != nil {
			f.wrong(err)
			continue
		}

		advertised := c.Config.AdvertiseAddr()
		if l.udp == nil || strings.HasSuffix(advertised, ":0") {
			f.finef("--"+a.Flag, "%s is free.", a.Addr)
		} else if err := c.checkAdvertise(ctx, l, advertised); err != nil {
			f.wrongf("--advertise", "other processes would dial %s, which %v; or give the address at which they reach "+
				"--cluster-listen", advertised, err)
		} else {
			f.finef("--cluster-listen", "%s is free, and TCP and UDP to %s lead to it.", a.Addr, advertised)
		}
		l.close()
	}
}

// checkAdvertise checks that TCP and UDP to addr lead to l, which answers as the server would.
func (c *checkCommand) checkAdvertise(ctx context.Context, l listener, addr string) error {
	answers, err := heartbeat.New(heartbeat.Config{
		Conn: l.udp, Keys: c.Config.ClusterKeys(), Name: addr, Log: zerolog.Nop(),
	})
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancel(ctx)
	var answering sync.WaitGroup
	defer answering.Wait()
	defer cancel()
	answering.Go(func() { answers.Run(ctx) })

	return c.reach(ctx, addr)
}

func (c *checkCommand) checkDirs(_ context.Context, f *findings) {
	for _, d := range []struct{ thing, dir string }{
		{"--data-dir", c.Config.DataDir}, {"--acme-dir", c.Config.ACMEDir},
	} {
		isUsed := d.dir != "" && (d.thing == "--data-dir" || len(c.Config.Domains) > 0)
		if !isUsed {
			continue
		}

		if err := writable(d.dir); err != nil {
			f.wrongf(d.thing, "it cannot be made or written: %v; give a directory that the server may write, on a "+
				"disk with room", err)
		} else {
			f.finef(d.thing, "%s can be written.", d.dir)
		}
	}

	if c.Config.DataDir == "" {
		return
	}

	files, _ := filepath.Glob(filepath.Join(c.Config.DataDir, "*.db")) // a name that is no pattern has none
	for _, path := range files {
		err := boltfile.Check(path, nil)
		isServed := f.runs && errors.Is(err, boltfile.ErrInUse) // by the server itself

		switch {
		case err == nil:
			f.finef("--data-dir", "%s can be read through.", path)
		case isServed:
		default:
			f.wrongf("--data-dir", "%v", err)
		}
	}

	if c.Config.Postgres != "" {
		err := noCountersIn(c.Config.DataDir)
		if errors.As(err, new(*setting.Error)) {
			f.wrong(err)
		}
	}
}

// writable checks that a directory can be written or, if it does not exist yet, the one in which the server would
// create it.
func writable(dir string) error {
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}

	file, err := os.CreateTemp(dir, ".check-*")
	if err != nil {
		return err
	}
	_, err = file.WriteString("headcount check\n")

	return errors.Join(err, file.Sync(), file.Close(), os.Remove(file.Name()))
}

// checkRedis checks the Redis of this region and of the others.
func (c *checkCommand) checkRedis(ctx context.Context, f *findings) {
	if c.Config.Redis == "" {
		return
	}

	var idSecrets [][]byte
	if c.Config.HasRole(presence.RoleGateway) {
		idSecrets = c.Config.IDKeys()
	}

	found := c.redis(ctx, f, "--redis", c.Config.Redis, factsOf(&c.Config), idSecrets)
	if len(found.Problems) == 0 {
		f.finef("--redis", "it answers, permits what is needed, and has the right time.")
	}

	for _, p := range found.Processes {
		if p.Name == c.Config.AdvertiseAddr() {
			continue
		}

		if err := c.reach(ctx, p.Name); err != nil {
			f.wrongf("processes", "%s has a lease, and %v", p.Name, err)
		} else {
			f.finef("processes", "%s is reached over TCP and UDP.", p.Name)
		}
	}

	if len(found.Problems) == 0 {
		c.checkOwners(ctx, f, found.Processes)
	}

	for _, peer := range c.Config.Peers {
		name, link := region.SplitPeer(peer)
		facts := presenceredis.Facts{Region: name, Counters: cluster.Format}
		found := c.redis(ctx, f, "--peer "+name, link, facts, nil)

		switch {
		case len(found.Problems) > 0:
		case found.Region == "":
			f.finef("--peer "+name, "its Redis answers; none of its processes has run yet.")
		default:
			f.finef("--peer "+name, "its Redis answers, and belongs to the region.")
		}
	}
}

// redis checks a Redis, and reports its problems.
func (c *checkCommand) redis(
	ctx context.Context, f *findings, thing, url string, facts presenceredis.Facts, idSecrets [][]byte,
) presenceredis.Checked {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	conn := redisconn.Config{URL: url, Dial: c.Patience, Log: zerolog.Nop()}
	found := presenceredis.Check(ctx, conn, facts, idSecrets)
	for _, problem := range found.Problems {
		f.wrongf(thing, "%s", problem)
	}

	return found
}

// reach checks that a process can be reached over TCP and UDP.
func (c *checkCommand) reach(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", name)
	if err != nil {
		return fmt.Errorf("cannot be reached from here: %w; see whether it runs, and whether a firewall lets TCP and "+
			"UDP through", err)
	}
	_ = conn.Close()

	if err := heartbeat.Probe(ctx, name, c.Config.ClusterKeys()); err != nil {
		return fmt.Errorf("is reached over TCP, but does not answer over UDP: %w; see whether a firewall lets UDP "+
			"through, and whether its --cluster-secret is the same", err)
	}

	return nil
}

// checkOwners says which processes own the counters. Processes that have just started may not own anything yet, and a
// partition that nobody has ever used has no owner.
func (c *checkCommand) checkOwners(ctx context.Context, f *findings, running []presence.Process) {
	owned, err := cluster.Owners(ctx, c.Config.Redis)
	if err != nil {
		f.wrongf("counters", "%v", err)
		return
	}

	gone := 0
	for _, owner := range slices.Sorted(maps.Keys(owned)) {
		runs := slices.ContainsFunc(running, func(p presence.Process) bool {
			return presence.IncarnationName(p.Name, p.Incarnation) == owner
		})
		if !runs {
			gone += owned[owner]
			continue
		}

		f.finef("counters", "%s owns %d of %d partitions.", presence.ProcessOf(owner), owned[owner], cluster.Partitions)
	}

	if gone > 0 && len(running) > 0 {
		f.wrongf("counters", "%d of %d partitions are of processes that have ended, and changes of their counters "+
			"wait; see whether a process with the role presence runs, and what it logs", gone, cluster.Partitions)
	}
}

func (c *checkCommand) checkPostgres(ctx context.Context, f *findings) {
	if c.Config.Postgres == "" {
		return
	}

	const thing = "--postgres"
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	found, err := routed.Check(ctx, c.Config.Postgres, placeOf(&c.Config).Use())
	refused := refusal(err)
	isOff := found.ClockOff > presenceredis.ClockTolerance

	switch {
	case refused != nil:
		f.wrong(refused)
	case err != nil:
		f.wrongf(thing, "PostgreSQL does not let the server in: %v; start it, or correct the URL", err)
	case found.ReadOnly:
		f.wrongf(thing, "PostgreSQL accepts no changes: it is a replica, or read only; name the primary")
	case !found.MakesTable:
		f.wrongf(thing, "the user may not create tables; grant it CREATE on the schema")
	case isOff: // reported below, because the clock may be wrong in addition to other problems
	default:
		f.finef(thing, "it answers, may be changed, and has the right time.")
	}

	if isOff {
		f.wrongf(thing, "the clocks of PostgreSQL and of this machine differ by %s; let both keep time by NTP",
			found.ClockOff.Round(time.Second))
	}
	if found.AdminSQL != "" {
		f.finef(thing, "applications cannot call headcount.change in SQL unless an administrator does: %s.",
			found.AdminSQL)
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
	if refused := refusal(err); refused != nil {
		f.wrong(refused)
	}
	if err == nil { // else --postgres says why
		f.finef("--pages-table", "headcount_pages is, or can be made, as the server needs it.")
	}
}

// checkKeys fetches --jwks-url as the server does.
func (c *checkCommand) checkKeys(_ context.Context, f *findings) {
	if c.Config.JWKSURL == "" {
		return
	}

	usable, err := identity.CheckKeys(c.Config.JWKSURL)
	switch {
	case err != nil:
		f.wrongf("--jwks-url", "%v; name the address of the key set", err)
	case usable == 0:
		f.wrongf("--jwks-url", "none of its keys can verify a token; name the address of keys for RS256, ES256 or "+
			"EdDSA")
	default:
		f.finef("--jwks-url", "it has %d keys.", usable)
	}
}

// checkReceivers checks in parallel that the receivers of --webhook can be reached. It sends them no event.
func (c *checkCommand) checkReceivers(ctx context.Context, f *findings) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	problems := make([]error, len(c.Config.Hooks))
	var asked sync.WaitGroup
	for i, hook := range c.Config.Hooks {
		asked.Go(func() { problems[i] = receives(ctx, hook) })
	}
	asked.Wait()

	for i, hook := range c.Config.Hooks {
		thing := fmt.Sprintf("--webhook, number %d", i+1)
		if problems[i] != nil {
			f.wrongf(thing, "%s %v", hook.Host, problems[i])
		} else {
			f.finef(thing, "%s answers. No event was sent to it.", hook.Host)
		}
	}
}

// receives returns why a receiver would not get events. One that only serves events may answer a HEAD with any status
// under 500.
func receives(ctx context.Context, hook *webhook.Hook) error {
	status, err := webhook.Reach(ctx, hook)
	fails := status >= 500 && status != http.StatusNotImplemented

	switch {
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return fmt.Errorf("has a certificate that is not trusted here: %w; give the receiver one for its name by an "+
			"authority that this machine knows", err)
	case err != nil:
		return fmt.Errorf("does not answer: %w; see whether the receiver runs, and whether this machine may reach it",
			err)
	case status/100 == 3:
		return fmt.Errorf("redirects (status %d), and redirects are not followed; name the URL to which it leads",
			status)
	case fails:
		return fmt.Errorf("answers with status %d; see what is wrong there: events wait until it accepts them", status)
	default:
		return nil
	}
}

// checkCertificates checks the files of --tls-cert, and the certificates of the public address.
func (c *checkCommand) checkCertificates(ctx context.Context, f *findings) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	now := time.Now()
	host, shown := certificates.Of(ctx, c.PublicURL)
	if len(shown) > 0 {
		problem := certificates.Problem(shown, host, nil, now)
		if problem != "" {
			f.wrongf("--public-url", "%s", problem)
		} else {
			f.finef("--public-url", "its certificate is for %s, and good until %s.",
				host, certificates.Day(shown[0].NotAfter))
		}
	}

	if c.Config.TLSCert == "" {
		return
	}

	opened, err := openCertificates(&c.Config, zerolog.Nop())
	if err != nil {
		f.wrong(err)
		return
	}

	leaf := opened.Shown()[0].Leaf
	problem := certificates.AgeProblem(leaf, now)
	if problem == "" && len(shown) == 0 && host != "" {
		problem = certificates.NameProblem(leaf, host)
	}

	isReported := len(shown) > 0 && shown[0].Equal(leaf)
	switch {
	case problem == "":
		f.finef("--tls-cert", "it fits its key, and is good until %s.", certificates.Day(leaf.NotAfter))
	case isReported: // of the public address
	default:
		f.wrongf("--tls-cert", "%s", problem)
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

	faults := way.Check(ctx)
	for _, err := range faults {
		f.wrong(err)
	}

	if len(faults) == 0 {
		f.finef("--public-url", "the proxy passes on what it should.")
	}
}
