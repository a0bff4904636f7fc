package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
	"headcount/presence"
)

// forPusher adds an app for Pusher's clients to a Config.
func forPusher(cfg *Config) {
	cfg.API.App.Key, cfg.UpdateInterval = "key", 10*time.Millisecond
}

// app opens a path below /app/, as pusher-js does.
func (s *served) app(path string, lines ...string) *raw {
	s.t.Helper()
	return s.open("/app/"+path, "", upgrade(lines...)...)
}

var established = regexp.MustCompile(
	`^{"event":"pusher:connection_established","data":"{\\"socket_id\\":\\"\d+\.\d+\\",\\"activity_timeout\\":\d+}"}$`)

// pusher returns a connected client of Pusher.
func (s *served) pusher(query string, lines ...string) *raw {
	s.t.Helper()
	r := s.app("key?protocol=7&client=js&version=8.6.0&flash=false"+query, lines...)
	r.response(http.StatusSwitchingProtocols)

	if _, text, err := r.frame(); err != nil || !established.Match(text) {
		s.t.Fatalf("the first frame is %s, %v; want connection_established", text, err)
	}
	return r
}

func (r *raw) trigger(event, data string) {
	r.t.Helper()
	r.write([]byte(masked(websocket.Text, fmt.Sprintf(`{"event":%q,"data":%s}`, event, data))))
}

func (r *raw) enters(channel string) {
	r.t.Helper()
	r.trigger(pusher.Subscribe, fmt.Sprintf(`{"auth":"","channel":%q}`, channel))
	r.expect(websocket.Text,
		fmt.Sprintf(`{"event":"pusher_internal:subscription_succeeded","channel":%q,"data":"{}"}`, channel))
}

// awaitsCount reads until a channel has the wanted count, and skips other counts of it.
func (r *raw) awaitsCount(channel string, want int) {
	r.t.Helper()
	event := fmt.Sprintf(`{"event":"pusher_internal:subscription_count","channel":%q,"data":"{\"subscription_count\":`,
		channel)
	for {
		opcode, text, err := r.frame()
		if err == nil && opcode == websocket.Ping {
			r.write([]byte(masked(websocket.Pong, "")))
			continue
		}

		if err != nil || !bytes.HasPrefix(text, []byte(event)) {
			r.t.Fatalf("%q, %v; want %d on %s", text, err, want, channel)
		}

		if string(text) == event+fmt.Sprint(want)+`}"}` {
			return
		}
	}
}

// TestPusher: clients of Pusher subscribe to channels, and get the counts of their pages.
func TestPusher(t *testing.T) {
	reg := prometheus.NewRegistry()
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.Registerer = reg
	}, func(t *testing.T, s *served) {
		one := s.pusher("")
		one.enters("news")
		one.awaitsCount("news", 1)
		one.trigger(pusher.Ping, "{}")
		one.expect(websocket.Text, `{"event":"pusher:pong","data":"{}"}`)
		one.trigger(pusher.Pong, "{}")

		two := s.pusher("", "Sec-WebSocket-Protocol: pusher-channels-protocol-7")
		two.enters("news")
		two.awaitsCount("news", 2)
		two.trigger(pusher.Subscribe, `{"channel":"news"}`) // subscribing again changes nothing
		two.awaitsCount("news", 2)
		two.enters(`a "b" \ é`)
		two.awaitsCount(`a "b" \ é`, 1)

		ours := s.socket(joins("news"))
		one.awaitsCount("news", 3)
		two.awaitsCount("news", 3)

		two.trigger(pusher.Unsubscribe, `{"channel":"news"}`)
		two.trigger(pusher.Unsubscribe, `{"channel":"news"}`) // no effect: it is not subscribed any more
		two.trigger(pusher.Ping, "{}")
		two.expect(websocket.Text, `{"event":"pusher:pong"`)
		if n := counted(t, reg, "headcount_leaves_total", "left"); n != 1 {
			t.Errorf("%v leaves with the cause left, want 1", n)
		}
		// A client that has unsubscribed gets no later counts.
		s.pusher("").enters("news")
		two.trigger(pusher.Ping, "{}")
		two.expect(websocket.Text, `{"event":"pusher:pong"`) // and no count before it
		_ = ours.Close()
		one.noCounts = true // counts of those who came and left meanwhile

		one.write([]byte(masked(websocket.Close, "\x03\xe8")))
		one.expectClose(1000)

		_ = two.Close()
		s.settles(1)
	})
}

// A visitor has the same identity, in the same cookie, whichever protocol a tab uses.
func TestPusherCountsPeople(t *testing.T) {
	inMemory(t, forPusher, func(t *testing.T, s *served) {
		r := s.app("key?protocol=7")
		cookie, _, _ := strings.Cut(r.response(http.StatusSwitchingProtocols).Header.Get("Set-Cookie"), ";")
		if !strings.HasPrefix(cookie, identity.Cookie+"=") {
			t.Fatalf("the cookie is %q, want %s", cookie, identity.Cookie)
		}

		_, _, _ = r.frame() // connection_established, which the method pusher checks
		r.enters("p")
		r.awaitsCount("p", 1)

		tab := s.pusher("", "Cookie: "+cookie)
		tab.enters("p")
		tab.awaitsCount("p", 1)
		s.looker("Cookie: " + cookie).say(`{"type":"join","page":"p"}`)

		other := s.pusher("")
		other.enters("p")
		other.awaitsCount("p", 2)

		// A crawler gets the same frames as everybody, and is not counted.
		crawler := s.pusher("", "User-Agent: Googlebot/2.1 (+http://www.google.com/bot.html)")
		crawler.enters("p")
		crawler.awaitsCount("p", 2)
		// Only the crawler and one visitor are on this page, so a crawler that counted would make the count two.
		other.enters("q")
		crawler.enters("q")
		crawler.awaitsCount("q", 1)
	})
}

// TestPusherFaults: mistakes of a client of Pusher get error events, and the twentieth closes the connection.
func TestPusherFaults(t *testing.T) {
	reg := prometheus.NewRegistry()
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.Private, cfg.Registerer = []string{"team/*"}, reg
	}, func(t *testing.T, s *served) {
		r := s.pusher("")
		refused := func(sends string, code int, says string) {
			t.Helper()
			r.write([]byte(sends))
			r.expect(websocket.Text, fmt.Sprintf(`{"data":{"code":%d,"message":%s`, code, says))
		}

		for channel, tc := range map[string]struct {
			code int
			says string
		}{
			"presence-room":              {pusher.CodeUnauthorized, `"a presence channel says who is there`},
			"private-room":               {pusher.CodeUnauthorized, `"a private channel needs an authorization`},
			"private-encrypted-room":     {pusher.CodeUnauthorized, `"a private channel needs an authorization`},
			"team/room":                  {pusher.CodeUnauthorized, `"this page is private`},
			"*":                          {pusher.CodeRejected, `"bad page: \"*\" is reserved`},
			"":                           {pusher.CodeRejected, `"bad page: it is empty`},
			"a\\u0000b":                  {pusher.CodeRejected, `"bad page`},
			strings.Repeat("x", 164):     {pusher.CodeRejected, `"bad page: it is longer`},
			"half a surrogate: \\ud800 ": {pusher.CodeRejected, `"bad page`},
		} {
			refused(masked(websocket.Text, `{"event":"pusher:subscribe","data":{"channel":"`+channel+`"}}`), tc.code,
				tc.says)
			r.expect(websocket.Text,
				`{"channel":"`+strings.ReplaceAll(channel, `\ud800`, "\ufffd")+`","data":{"error":`+tc.says)
		}

		for _, text := range []string{
			"{", `{"event":"pusher:subscribe","data":"news"}`, `{"event":"pusher:cache","data":{}}`,
			`{"event":"client-typing","channel":"news","data":{}}`,
		} {
			refused(masked(websocket.Text, text), pusher.CodeRejected, `"`)
		}

		refused(masked(websocket.Binary, "x"), pusher.CodeRejected, `"binary`)
		if n := counted(t, reg, "headcount_client_errors_total", calls.CodeForbidden); n != 4 {
			t.Errorf("%v faults %s were counted, want 4", n, calls.CodeForbidden)
		}

		// A refused channel is no mistake of the client's library, so it does not count as an error.
		for range bounds.Errors.Max {
			refused(masked(websocket.Text, `{"event":"pusher:signin","data":{"auth":"a","user_data":"{}"}}`),
				pusher.CodeUnauthorized, `"nobody can sign in here`)
		}

		r.enters("news") // the connection is still open
		r.awaitsCount("news", 1)

		// With the nine channels, four texts and one binary frame above, a client may make so many more errors.
		for range bounds.Errors.Max - 14 {
			refused(masked(websocket.Binary, "x"), pusher.CodeRejected, `"binary`)
		}

		r.expect(websocket.Text, `{"data":{"code":4301,"message":"too many errors`)
		r.expectClose(pusher.CodeRejected)

		long := s.pusher("")
		long.write([]byte(masked(websocket.Text, strings.Repeat("x", websocket.MaxMessage+1))))
		long.expect(websocket.Text, `{"data":{"code":4301,"message":"a message is at most`)
		long.expectClose(websocket.StatusTooBig)
	})
}

// A connection has as many channels as it may have pages. Channels that are new to the gateway are charged like new
// pages.
func TestPusherChannelsAreBounded(t *testing.T) {
	inMemory(t, forPusher, func(t *testing.T, s *served) {
		r := s.pusher("")
		for i := range 100 {
			r.trigger(pusher.Subscribe, fmt.Sprintf(`{"channel":"p%d"}`, i))
		}

		r.trigger(pusher.Subscribe, `{"channel":"one more"}`)
		// The counts of the first 100 come in between, so frames are read until the error.
		for {
			_, text, err := r.frame()
			if err != nil {
				t.Fatal(err)
			}

			if bytes.Contains(text, []byte(`pusher:error`)) {
				if !bytes.Contains(text, []byte("at most 100 pages")) {
					t.Errorf("got %s, want the bound of 100 pages", text)
				}

				return
			}
		}
	})
}

// Whatever refuses another upgrade also refuses that of a client of Pusher, which learns why from a close frame.
func TestPusherRefusals(t *testing.T) {
	memory, reg := &scarce{}, prometheus.NewRegistry()
	proxies, err := identity.NewProxies([]string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.MaxPerAddress, cfg.MaxConnections = 2, 2
		cfg.Memory, cfg.Proxies = memory, proxies
		cfg.Registerer = reg
		cfg.Keys, _ = identity.NewSiteKeys([]string{"k"}, cfg.Sites)
	}, func(t *testing.T, s *served) {
		refused := func(code int, says, path string, lines ...string) {
			t.Helper()

			r := s.app(path, lines...)
			if head := r.response(http.StatusSwitchingProtocols).Header; head.Get("Content-Length") != "" ||
				head.Get("Set-Cookie") != "" {
				t.Errorf("the answer has the headers %v", head)
			}

			r.expect(websocket.Text, fmt.Sprintf(`{"data":{"code":%d,"message":"`, code))
			opcode, payload, err := r.frame()
			if err != nil || opcode != websocket.Close || int(binary.BigEndian.Uint16(payload)) != code ||
				!strings.Contains(string(payload), says) {
				t.Errorf("%s: %q, %v; want %d, %s", path, payload, err, code, says)
			}

			r.expectEnd()
		}

		refused(pusher.CodeUnknownKey, "--pusher-key", "another?protocol=7")
		refused(pusher.CodeUnknownKey, "--pusher-key", "key/x?protocol=7")
		refused(pusher.CodeVersion, `"8"; this server speaks 7`, "key?protocol=8")
		refused(pusher.CodeVersion, `""`, "key")
		refused(pusher.CodeUnauthorized, "API key is wrong", "key?protocol=7", "X-API-Key: wrong")

		memory.Store(true)
		refused(pusher.CodeOverCapacity, "memory", "key?protocol=7")
		memory.Store(false)

		one, two := s.pusher(""), s.pusher("", "X-Forwarded-For: 192.0.2.2")
		// Two addresses use up both places.
		refused(pusher.CodeOverCapacity, "limit of connections", "key?protocol=7")
		_ = two.Close()
		s.settles(1)

		// Now both places belong to one address, so the limit of the address is what refuses the next.
		second := s.pusher("")
		refused(pusher.CodeOverCapacity, "--max-connections-per-address", "key?protocol=7")
		_ = second.Close()

		for reason, want := range map[string]float64{
			httppolicy.ReasonMemory: 1, httppolicy.ReasonConnections: 1, httppolicy.ReasonAddress: 1, "not_found": 2,
			"bad_request": 2, httppolicy.ReasonAPIKey: 1,
		} {
			// A refusal is counted only after its answer.
			testkit.Eventually(t, fmt.Sprintf("%v refusals for the reason %s", want, reason), func() bool {
				return counted(t, reg, "headcount_http_refusals_total", reason) == want
			})
		}

		for path, tc := range map[string]struct {
			status int
			lines  []string
		}{
			"/app/key":     {http.StatusUpgradeRequired, nil},
			"/app/another": {http.StatusNotFound, nil},
			"/app/counter": {http.StatusOK, nil}, // a count of the page "app"
			"/app/key?protocol=7": {
				http.StatusForbidden, []string{"Origin: http://evil.example", "Upgrade: websocket"},
			},
			"/app/key?protocol=7&": {
				http.StatusBadRequest, []string{
					"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 12",
				},
			},
		} {
			s.open(path, "", append(tc.lines, "Connection: close")...).response(tc.status)
		}

		_ = one.Close()
		s.settles(0)
	})
}

// With tokens a client needs one. It opens private pages, and the connection ends with it.
func TestPusherWithTokens(t *testing.T) {
	const secret = "a secret for tests"
	identities := identity.New(identity.Config{
		IDSecrets: [][]byte{[]byte("0123456789abcdef")}, JWTSecret: []byte(secret),
	})
	t.Cleanup(identities.Close)
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.Identities, cfg.Private = identities, []string{"team/*"}
	}, func(t *testing.T, s *served) {
		r := s.app("key?protocol=7")
		r.response(http.StatusSwitchingProtocols)
		r.expect(websocket.Text, `{"data":{"code":4009,"message":`)
		r.expectClose(pusher.CodeUnauthorized)

		token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{
			"sub": "alice", "exp": time.Now().Add(time.Hour).Unix(), "pages": []string{"team/a"},
		}).SignedString([]byte(secret))
		if err != nil {
			t.Fatal(err)
		}

		alice, tab := s.pusher("&token="+token), s.pusher("&token="+token)
		for _, r := range []*raw{alice, tab} {
			r.enters("team/a")
			r.awaitsCount("team/a", 1)
		}

		alice.trigger(pusher.Subscribe, `{"channel":"team/b"}`)
		alice.expect(websocket.Text, `{"data":{"code":4009,"message":"this page is private`)

		s.expire()
		tab.expect(websocket.Text, `{"data":{"code":4009,"message":"the token has expired`)
		tab.expectClose(pusher.CodeUnauthorized)
	})
}

// A gateway that drains closes the connections of Pusher's clients one after the other, since they reconnect at once
// and this gateway refuses them.
func TestPusherWhileDraining(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.ShutdownTimeout = 10 * time.Second
		cluster := cfg.Cluster.(lone)
		cluster.others = []presence.Process{{Name: "another", Roles: []string{presence.RoleGateway}}}
		cfg.Cluster = cluster
	}, func(t *testing.T, s *served) {
		r := s.pusher("")
		r.enters("p")
		r.awaitsCount("p", 1)

		const others = 20
		ended := make(chan time.Time, others)
		for range others {
			other := s.pusher("")
			go func() { // ends with the connection
				for {
					if opcode, _, err := other.frame(); err != nil || opcode == websocket.Close {
						ended <- time.Now()
						return
					}
				}
			}()
		}

		ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
		defer cancel()
		var drained sync.WaitGroup
		drained.Go(func() { s.g.Drain(ctx) })
		r.expectClose(pusher.CodeReconnect)
		// This code makes pusher-js wait: an immediate attempt would reach this gateway again.
		late := s.app("key?protocol=7")
		late.response(http.StatusSwitchingProtocols)
		late.expect(websocket.Text, `{"data":{"code":4100,"message":"`)
		late.expectClose(pusher.CodeOverCapacity)

		// The client answers with code 4200, as the gateway sent it.
		r.write([]byte(masked(websocket.Close, "\x10\x68")))
		r.expectEnd()

		var times []time.Time
		for range others {
			times = append(times, <-ended)
		}
		slices.SortFunc(times, time.Time.Compare)
		// A common moment would send all of them to the other gateways at once.
		if within := times[others-1].Sub(times[0]); within < 200*time.Millisecond {
			t.Errorf("all connections ended within %s, want about a second", within)
		}

		drained.Wait()
	})
}

// The last gateway keeps its connections until it ends. A second later another one may listen here; a client that comes
// earlier finds none, and waits for 15 s.
func TestPusherStaysWithTheLastGateway(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		forPusher(cfg)
		cfg.ShutdownTimeout = 10 * time.Second
		cluster := cfg.Cluster.(lone)
		cluster.others = []presence.Process{
			{Name: cfg.Name, Roles: []string{presence.RoleGateway}},
			{Name: "a node", Roles: []string{presence.RolePresence}},
			{Name: "a gateway that leaves"},
		}

		cfg.Cluster = cluster
	}, func(t *testing.T, s *served) {
		var clients []*raw
		for range 5 {
			clients = append(clients, s.pusher(""))
		}

		var drained sync.WaitGroup
		drained.Go(func() { s.g.Drain(t.Context()) })
		for _, r := range clients {
			r.expectClose(pusher.CodeOverCapacity)
			_ = r.Close()
		}

		drained.Wait()
	})
}
