package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/coder/websocket"
	"github.com/rs/zerolog"

	"headcount/counter/cluster"
	"headcount/counter/routed"
	"headcount/gateway/counterapi"
	"headcount/internal/boltfile"
	"headcount/internal/redisconn"
	"headcount/internal/setting"
	"headcount/internal/webhook"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/presenceredis"
	"headcount/presence/region"
)

// checkCommand reports problems that keep a server with these settings from working. It tries
// the services that the server would use, and the server itself through its proxy, and leaves
// nothing changed.
type checkCommand struct {
	ConfigFile string        `name:"config" type:"text" placeholder:"FILE" help:"A file with a JSON object of settings, as serve reads it."`
	PublicURL  string        `type:"text" placeholder:"URL" help:"The address at which visitors reach the server, through its proxy, such as https://count.example.com. With it and a running server the proxy is checked, too."`
	Patience   time.Duration `type:"span" placeholder:"TIME" default:"5s" help:"How long to wait for each answer."`
	Config     Config        `embed:""`
}

// AfterApply is called when the settings are read.
func (c *checkCommand) AfterApply() error { return c.Config.Validate() }

// errFaults is the result of a check that found problems.
var errFaults = errors.New("something is wrong")

// findings writes the results of a check.
type findings struct {
	out   io.Writer
	wrong int // the number of problems
}

// wrongf reports a problem of a thing, in a sentence.
func (f *findings) wrongf(thing, format string, args ...any) {
	f.wrong++
	fmt.Fprintf(f.out, "wrong  %s: %s\n", thing, fmt.Sprintf(format, args...))
}

func (f *findings) finef(thing, format string, args ...any) {
	fmt.Fprintf(f.out, "fine   %s: %s\n", thing, fmt.Sprintf(format, args...))
}

// run writes a line for each thing that it checked. It returns errFaults if there are problems. A line "open" is no
// problem: the access may be intended.
func (c *checkCommand) run(ctx context.Context, out io.Writer) error {
	if c.PublicURL != "" {
		u, err := url.Parse(c.PublicURL)
		isOrigin := err == nil && setting.IsWebURL(c.PublicURL) && strings.Trim(u.Path, "/") == ""
		if !isOrigin {
			return setting.Errorf("public-url", "it is not an http or https URL without a path; write the address "+
				"that visitors open, such as https://count.example.com")
		}
	}

	f := &findings{out: out}
	f.finef("settings", "they can be read, and fit together.")
	for _, warning := range c.Config.Warnings() {
		f.wrongf("settings", "%s.", warning)
	}
	for _, open := range c.Config.Open() {
		fmt.Fprintf(out, "open   settings: %s.\n", open)
	}

	runs := c.adminAnswers(ctx)
	for _, look := range []func(context.Context, *findings, bool){
		c.checkPorts, c.checkDirs, c.checkRedis, c.checkPeers, c.checkPostgres,
		c.checkKeys, c.checkReceivers, c.checkCertificates, c.checkPublic,
	} {
		look(ctx, f, runs)
	}

	if f.wrong > 0 {
		return errFaults
	}

	return nil
}

// admin returns the URL of the admin address.
func (c *checkCommand) admin() string { return adminURL(c.Config.AdminListen) }

// adminAnswers reports whether a server with these settings runs.
func (c *checkCommand) adminAnswers(ctx context.Context) bool {
	status, body, err := c.get(ctx, c.admin()+"/healthz")
	return err == nil && status == http.StatusOK && strings.TrimSpace(body) == "ok"
}

func (c *checkCommand) get(ctx context.Context, url string) (status int, body string, err error) {
	return ask(ctx, c.Patience, http.MethodGet, url, nil)
}

// ask sends a request on a new connection, without the proxy settings of the environment.
func ask(ctx context.Context, timeout time.Duration, method, url string, content []byte) (
	status int, body string, err error,
) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(content))
	if err != nil {
		return 0, "", err
	}

	resp, err := direct.Do(req)
	if err != nil {
		return 0, "", setting.Cause(err)
	}
	defer resp.Body.Close()

	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(text), err
}

var direct = &http.Client{
	Transport:     &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

// checkPorts binds the ports that the server would bind. If the server runs, it asks the server whether it is ready.
func (c *checkCommand) checkPorts(ctx context.Context, f *findings, runs bool) {
	if runs {
		status, body, err := c.get(ctx, c.admin()+"/readyz")
		switch {
		case err != nil:
			f.wrongf("server", "it runs, and does not say whether it is ready: %v.", err)
		case status != http.StatusOK:
			f.wrongf("server", "it runs and is %s.", strings.TrimSpace(body))
		default:
			f.finef("server", "it runs, and is ready.")
		}

		return
	}

	for _, p := range c.Config.addresses() {
		l, err := listen(ctx, p.flag, p.addr)
		if err != nil {
			f.wrongf("--"+p.flag, "the server cannot listen on %s: %v; end the program that does, or give another "+
				"port.", p.addr, errors.Unwrap(err))
			continue
		}
		if p.flag == "cluster-listen" {
			c.checkAdvertise(ctx, f, l)
		} else {
			f.finef("--"+p.flag, "%s is free.", p.addr)
		}
		_ = l.Close()
	}
}

// arrival is how long a connection that the client has established may take to be accepted.
const arrival = time.Second

// checkAdvertise binds the UDP port of l's address, and checks that TCP and UDP to --advertise lead to these ports.
func (c *checkCommand) checkAdvertise(ctx context.Context, f *findings, l net.Listener) {
	udp, err := net.ListenPacket("udp", l.Addr().String())
	if err != nil {
		f.wrongf("--cluster-listen", "the server cannot listen on UDP: %v; end the program that does, or give "+
			"another port.", err)
		return
	}
	defer udp.Close()

	addr := c.Config.AdvertiseAddr()
	if strings.HasSuffix(addr, ":0") {
		f.finef("--cluster-listen", "a port is free.")
		return
	}

	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		f.wrongf("--advertise", "other processes would dial %s, which does not lead here: %v; give the address at "+
			"which they reach --cluster-listen.", addr, err)
		return
	}
	defer conn.Close()

	arrived := make(chan bool, 1)
	go func() { // ends with l or at once
		_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(arrival))
		for {
			in, err := l.Accept()
			if err != nil {
				arrived <- false
				return
			}

			same := in.RemoteAddr().String() == conn.LocalAddr().String()
			_ = in.Close()
			if same {
				arrived <- true
				return
			}
		}
	}()

	if !<-arrived {
		f.wrongf("--advertise", "other processes would dial %s, where something else answers; give the address at "+
			"which they reach --cluster-listen.", addr)
	} else if err := comesBack(ctx, addr, udp); err != nil {
		f.wrongf("--advertise", "TCP to %s leads here, and UDP does not: %v; let UDP through to the same port.",
			addr, err)
	} else {
		f.finef("--cluster-listen", "%s is free, and TCP and UDP to %s lead to it.", c.Config.ClusterListen, addr)
	}
}

// comesBack checks that a datagram to addr arrives at l, until ctx ends.
func comesBack(ctx context.Context, addr string, l net.PacketConn) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "udp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()

	end, _ := ctx.Deadline()
	sent := []byte(rand.Text())
	if _, err := conn.Write(sent); err != nil {
		return err
	}

	_ = l.SetReadDeadline(end)
	for buf := make([]byte, len(sent)+1); ; { // datagrams of other senders are ignored
		n, _, err := l.ReadFrom(buf)
		if err != nil {
			return errors.New("a datagram does not arrive")
		}
		if bytes.Equal(buf[:n], sent) {
			return nil
		}
	}
}

func (c *checkCommand) checkDirs(_ context.Context, f *findings, runs bool) {
	checkDir(f, "--data-dir", c.Config.DataDir)
	checkFiles(f, c.Config.DataDir, runs)

	if c.Config.Postgres != "" {
		var refused *setting.Error
		if errors.As(noCountersIn(c.Config.DataDir), &refused) {
			f.wrongf("--data-dir", "%s.", refused.Problem)
		}
	}

	if len(c.Config.Domains) > 0 { // the default is a directory below --data-dir
		checkDir(f, "--acme-dir", c.Config.ACMEDir)
	}
}

// checkFiles checks the files of a data directory, unless the server that runs has them open.
func checkFiles(f *findings, dir string, runs bool) {
	if dir == "" {
		return
	}

	files, err := filepath.Glob(filepath.Join(dir, "*.db"))
	if err != nil { // a name that is no pattern
		return
	}

	for _, path := range files {
		err := boltfile.Check(path, nil)
		if runs && errors.Is(err, boltfile.ErrInUse) {
			continue
		}

		if err != nil {
			f.wrongf("--data-dir", "%v.", err)
		} else {
			f.finef("--data-dir", "%s can be read through.", path)
		}
	}
}

// checkDir writes into a directory, if there is one.
func checkDir(f *findings, thing, dir string) {
	if dir == "" {
		return
	}

	// Remove the directories made here: they would belong to the user who runs the check, and perhaps not to the
	// server's.
	var made []string
	for at := filepath.Clean(dir); at != filepath.Dir(at); at = filepath.Dir(at) {
		if _, err := os.Stat(at); err == nil {
			break
		}
		made = append(made, at)
	}
	defer func() {
		for _, at := range made {
			_ = os.Remove(at) // a directory that is not empty is in use by now
		}
	}()

	if err := os.MkdirAll(dir, 0o700); err != nil {
		f.wrongf(thing, "it cannot be made: %v; give a directory that the server may write.", err)
		return
	}

	file, err := os.CreateTemp(dir, ".check-*")
	if err != nil {
		f.wrongf(thing, "it cannot be written: %v; give a directory that the server may write.", err)
		return
	}

	_, err = file.WriteString("headcount check\n")
	err = errors.Join(err, file.Sync(), file.Close(), os.Remove(file.Name()))
	if err != nil {
		f.wrongf(thing, "it cannot be written: %v; give it a disk with room.", err)
		return
	}

	f.finef(thing, "%s can be written.", dir)
}

func (c *checkCommand) checkRedis(ctx context.Context, f *findings, _ bool) {
	if c.Config.Redis == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	var idSecrets [][]byte
	if c.Config.HasRole(presence.RoleGateway) {
		idSecrets = keysOf(c.Config.idSecrets())
	}

	conn := redisconn.Config{URL: c.Config.Redis, Dial: c.Patience, Log: zerolog.Nop()}
	found := presenceredis.Check(ctx, conn, c.Config.facts(), idSecrets)
	for _, problem := range found.Problems {
		f.wrongf("--redis", "%s", problem)
	}
	if len(found.Problems) == 0 {
		f.finef("--redis", "it answers, permits what is needed, and has the right time.")
	}

	for _, p := range found.Processes {
		if p.Name == c.Config.AdvertiseAddr() {
			continue
		}
		c.checkProcess(ctx, f, p.Name)
	}

	if len(found.Problems) == 0 {
		c.checkOwners(ctx, f, found.Processes)
	}
}

// checkOwners says which processes own the counters. Processes that have just started may not own anything yet, and a
// partition that nobody has ever used has no owner.
func (c *checkCommand) checkOwners(ctx context.Context, f *findings, running []presence.Process) {
	const thing = "counters"
	owned, err := cluster.Owners(ctx, c.Config.Redis)
	if err != nil {
		f.wrongf(thing, "%v.", err)
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

		f.finef(thing, "%s owns %d of %d partitions.", presence.ProcessOf(owner), owned[owner], cluster.Partitions)
	}

	if gone > 0 && len(running) > 0 {
		f.wrongf(thing, "%d of %d partitions are of processes that have ended, and changes of their counters wait; "+
			"see whether a process with the role presence runs, and what it logs.", gone, cluster.Partitions)
	}
}

// checkProcess checks that another process can be reached over TCP and UDP.
func (c *checkCommand) checkProcess(ctx context.Context, f *findings, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.Patience)
	defer cancel()

	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", name)
	if err != nil {
		f.wrongf("processes", "%s has a lease, and cannot be reached from here: %v; see whether it runs, and "+
			"whether a firewall lets TCP and UDP through.", name, err)
		return
	}

	_ = conn.Close()

	if err := heartbeat.Probe(ctx, name, keysOf(c.Config.ClusterSecrets)); err != nil {
		f.wrongf("processes", "%s is reached over TCP, and does not answer over UDP: %v; see whether a firewall "+
			"lets UDP through, and whether its --cluster-secret is the same (a release before the one that brought "+
			"this check does not answer).", name, err)
		return
	}

	f.finef("processes", "%s is reached over TCP and UDP.", name)
}

func (c *checkCommand) checkPeers(ctx context.Context, f *findings, _ bool) {
	for _, peer := range c.Config.Peers {
		name, link := region.SplitPeer(peer)
		thing := "--peer " + name

		one, cancel := context.WithTimeout(ctx, c.Patience)
		conn := redisconn.Config{URL: link, Dial: c.Patience, Log: zerolog.Nop()}
		found := presenceredis.Check(one, conn, presenceredis.Facts{Region: name, Counters: cluster.Format}, nil)
		cancel()

		for _, problem := range found.Problems {
			f.wrongf(thing, "%s", problem)
		}
		switch {
		case len(found.Problems) > 0:
		case found.Region == "":
			f.finef(thing, "its Redis answers; none of its processes has run yet.")
		default:
			f.finef(thing, "its Redis answers, and belongs to the region.")
		}
	}
}

func (c *checkCommand) checkPostgres(ctx context.Context, f *findings, _ bool) {
	if c.Config.Postgres == "" {
		return
	}

	const thing = "--postgres"
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	found, err := routed.Check(ctx, c.Config.Postgres, c.Config.postgresUse())
	err = refusedPostgres(err)
	if err != nil {
		s := &setting.Error{Problem: "PostgreSQL does not let the server in: " + oneLine(err) + "; start it, or " +
			"correct the URL"}
		errors.As(err, &s)
		f.wrongf(thing, "%s.", s.Problem)
		return
	}

	wrong := f.wrong
	if found.ReadOnly {
		f.wrongf(thing, "PostgreSQL accepts no changes: it is a replica, or read only; name the primary.")
	} else if !found.MakesTable {
		f.wrongf(thing, "the user may not create tables; grant it CREATE on the schema.")
	}

	if found.ClockOff > presenceredis.ClockTolerance {
		f.wrongf(thing, "the clocks of PostgreSQL and of this machine differ by %s; let both keep time by NTP.",
			found.ClockOff.Round(time.Second))
	}

	if f.wrong == wrong {
		f.finef(thing, "it answers, may be changed, and has the right time.")
	}
	if found.AdminSQL != "" {
		f.finef(thing, "applications cannot call headcount.change in SQL unless an administrator does: %s.",
			found.AdminSQL)
	}
}

// oneLine returns the text of an error on one line.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// checkKeys fetches --jwks-url.
func (c *checkCommand) checkKeys(ctx context.Context, f *findings, _ bool) {
	if c.Config.JWKSURL == "" {
		return
	}

	const thing = "--jwks-url"
	status, body, err := c.get(ctx, c.Config.JWKSURL)
	var set struct{ Keys []json.RawMessage }
	hasKeys := json.Unmarshal([]byte(body), &set) == nil && len(set.Keys) > 0

	switch {
	case err != nil:
		f.wrongf(thing, "it does not answer: %v.", err)
	case status != http.StatusOK:
		f.wrongf(thing, "it answers with status %d; name the address of the key set.", status)
	case !hasKeys:
		f.wrongf(thing, "it has no keys; name the address of the key set.")
	default:
		f.finef(thing, "it has %d keys.", len(set.Keys))
	}
}

// checkReceivers checks that the receivers of --webhook can be reached, all at once. It sends them no event.
func (c *checkCommand) checkReceivers(ctx context.Context, f *findings, _ bool) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	type answer struct {
		status int
		err    error
	}

	answers := make([]answer, len(c.Config.Hooks))
	var asked sync.WaitGroup
	for i, hook := range c.Config.Hooks {
		asked.Go(func() { answers[i].status, answers[i].err = webhook.Reach(ctx, hook) })
	}
	asked.Wait()

	for i, hook := range c.Config.Hooks {
		thing := fmt.Sprintf("--webhook, number %d", i+1)
		a := answers[i]
		fails := a.status >= 500 && a.status != http.StatusNotImplemented

		switch {
		case errors.As(a.err, new(*tls.CertificateVerificationError)):
			f.wrongf(thing, "the certificate of %s is not trusted here: %v; give the receiver one for its name by "+
				"an authority that this machine knows.", hook.Host, oneLine(a.err))
		case a.err != nil:
			f.wrongf(thing, "%s does not answer: %v; see whether the receiver runs, and whether this machine may "+
				"reach it.", hook.Host, oneLine(a.err))
		case a.status/100 == 3:
			f.wrongf(thing, "%s redirects (status %d), and redirects are not followed; name the URL to which it "+
				"leads.", hook.Host, a.status)
		case fails:
			f.wrongf(thing, "%s answers with status %d; see what is wrong there: events wait until it accepts "+
				"them.", hook.Host, a.status)
		default: // a receiver that only serves events may answer a HEAD with any other status
			f.finef(thing, "%s answers. No event was sent to it.", hook.Host)
		}
	}
}

// checkPublic asks the server through its proxy.
func (c *checkCommand) checkPublic(ctx context.Context, f *findings, runs bool) {
	if c.PublicURL == "" {
		return
	}
	const thing = "--public-url"
	origin := strings.TrimSuffix(c.PublicURL, "/")
	base := origin + c.Config.BasePath

	status, body, err := c.get(ctx, base+"/-/counters?page=*")
	isUnready := status == http.StatusServiceUnavailable && strings.Contains(body, `"status"`)
	isHeadcount := status == http.StatusOK && strings.Contains(body, `{"counters":[`)

	switch {
	case errors.As(err, new(*tls.CertificateVerificationError)): // checkCertificates has reported it
		return
	case err != nil:
		f.wrongf(thing, "nothing answers: %v; see whether the proxy runs, and whether the name leads to it.", err)
		return
	case isUnready:
		f.wrongf(thing, "the server behind the proxy is not ready.")
		return
	case !isHeadcount:
		f.wrongf(thing, "something else than Headcount answers, with status %d; have the proxy pass requests to "+
			"--listen.", status)
		return
	}

	wrong := f.wrong
	status, body, err = c.get(ctx, base+"/check%2Fthis/counter")
	// 403: it is private
	if err == nil && status != http.StatusForbidden && !strings.Contains(body, `"page":"check/this"`) {
		f.wrongf(thing, "the proxy decodes %%2F in paths, and pages with a slash are not found; have it pass on "+
			"the path as it came (in nginx: proxy_pass without a path).")
	}

	hostIsRight := true
	if runs {
		hostIsRight = c.checkRequests(ctx, f, base)
	} else {
		f.wrongf(thing, "no server answers at --admin-listen, so the headers that the proxy sends cannot be "+
			"checked; run the check on the server's machine.")
	}
	if !hostIsRight {
		origin = "" // a wrong Host alone makes the server refuse the origin, which would hide other problems
	}

	c.checkSocket(ctx, f, base, origin)
	c.checkStream(ctx, f, base)

	if f.wrong == wrong {
		f.finef(thing, "the proxy passes on what it should.")
	}
}

// probeTries is how often a probe is repeated because another of several gateways answered.
const probeTries = 20

// checkRequests compares requests as the server received them with those that were sent. It
// reports whether the Host is right.
func (c *checkCommand) checkRequests(ctx context.Context, f *findings, base string) (host bool) {
	const thing = "--public-url"
	u, _ := url.Parse(base) // run has checked it
	seen, err := c.probe(ctx, base, http.MethodGet, nil)
	if err != nil {
		const text = "no request reaches the server of --admin-listen (%v); " +
			"have the proxy pass requests to its --listen, and to every path."
		f.wrongf(thing, text, err)
		return true
	}

	host = strings.EqualFold(seen.Host, u.Host)
	if !host {
		f.wrongf(thing, "the proxy replaces the Host %q by %q, and pages of your own site are refused; have it "+
			"pass on the Host (in nginx: proxy_set_header Host $http_host).", u.Host, seen.Host)
	}

	if seen.ForwardedFor && !seen.Trusted {
		f.wrongf("--trusted-proxies", "the proxy at %s sends the addresses of its clients, and is not trusted: all "+
			"clients count as one address; give --trusted-proxies %s.", seen.Peer, seen.Peer)
	}

	if u.Scheme == "https" && !seen.Secure && (seen.Trusted || !seen.ForwardedFor) {
		f.wrongf(thing, "the server does not know that clients use https, so its cookies are not Secure; have the "+
			"proxy send X-Forwarded-Proto, and name the proxy in --trusted-proxies.")
	}

	c.checkBody(ctx, f, base)

	return host
}

// probe sends a request to the server of --admin-listen through the proxy, and returns what arrived of it.
func (c *checkCommand) probe(ctx context.Context, base, method string, content []byte) (seen probed, err error) {
	status := 0

	for range probeTries {
		_, name, err := ask(ctx, c.Patience, http.MethodPost, c.admin()+"/probe", nil)
		if err != nil {
			return probed{}, err
		}

		var body string
		status, body, err = ask(ctx, c.Patience, method, base+probePath+name, content)
		if err != nil {
			return probed{}, err
		}

		if json.Unmarshal([]byte(body), &seen) == nil && seen.Host != "" {
			return seen, nil
		}
	}

	return probed{}, fmt.Errorf("status %d", status)
}

// checkBody sends the largest body that the server reads. A proxy may have a smaller limit of its own.
func (c *checkCommand) checkBody(ctx context.Context, f *findings, base string) {
	seen, err := c.probe(ctx, base, http.MethodPost, make([]byte, counterapi.MaxBody))
	if err == nil && seen.Body < counterapi.MaxBody {
		err = fmt.Errorf("%d bytes arrive", seen.Body)
	}

	if err != nil {
		const text = "the proxy does not pass on a body of 256 KiB, which a batch of changes may have (%v); " +
			"have it pass on 1 MiB (in nginx: client_max_body_size 1m)."
		f.wrongf("--public-url", text, err)
	}
}

// checkSocket opens a WebSocket as a page of the origin would, or as a program without one.
func (c *checkCommand) checkSocket(ctx context.Context, f *findings, base, origin string) {
	const thing = "--public-url"
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	header := http.Header{}
	if origin != "" {
		header.Set("Origin", origin)
	}

	ws, resp, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(base, "http")+"/-/ws", &websocket.DialOptions{
		HTTPClient: direct, HTTPHeader: header, Subprotocols: []string{"headcount.v1"},
	})
	if err == nil {
		_ = ws.CloseNow()
		return
	}

	// A server that requires tokens refuses this upgrade, so its answer shows that the upgrade has reached the server.
	tokens := c.Config.JWTSecret != "" || c.Config.JWKSURL != ""
	reached := resp != nil && resp.StatusCode == http.StatusUnauthorized && tokens

	switch {
	case resp == nil:
		f.wrongf(thing, "WebSockets do not open: %v.", setting.Cause(err))
	case reached:
	case resp.StatusCode == http.StatusForbidden:
		f.wrongf("--allow-origins", "pages of %s may not use the server; add it.", origin)
	default:
		f.wrongf(thing, "the proxy does not pass on the upgrade to WebSockets (status %d), and browsers fall back "+
			"to event streams; have it pass on Upgrade and Connection (in nginx: proxy_http_version 1.1, "+
			"proxy_set_header Upgrade $http_upgrade, and Connection).", resp.StatusCode)
	}
}

// checkStream opens an event stream, whose first event comes at once.
func (c *checkCommand) checkStream(ctx context.Context, f *findings, base string) {
	ctx, cancel := context.WithTimeout(ctx, c.Patience)
	defer cancel()

	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, base+"/*/counter/events", nil) // run has checked base
	req.Header.Set("Accept", "text/event-stream")

	resp, err := direct.Do(req)
	if err == nil {
		defer resp.Body.Close()

		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), "data:") {
				return
			}
		}
		err = lines.Err()
	}

	if errors.Is(err, context.DeadlineExceeded) {
		f.wrongf("--public-url", "the proxy holds event streams back: the first event did not arrive within %s; "+
			"turn off its buffering (in nginx: proxy_buffering off).", c.Patience)
		return
	}

	status := 0
	if resp != nil {
		status = resp.StatusCode
	}
	f.wrongf("--public-url", "event streams do not open (status %d): %v.",
		status, setting.Cause(errors.Join(err, io.EOF)))
}
