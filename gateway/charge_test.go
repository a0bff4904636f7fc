package gateway

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/counter/limit"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
)

// A client that floods the gateway with messages of any kind gets errors, is read slowly, and is closed at its
// twentieth error.
func TestServerFloods(t *testing.T) {
	t.Parallel()
	polled(t, nil, func(t *testing.T, s *served) {
		// Each kind has a connection of its own, all at the same time.
		var wg sync.WaitGroup
		for name, frame := range map[string]string{
			"messages":        masked(websocket.Text, heartbeatMsg),
			"pings":           masked(websocket.Ping, ""),
			"pongs":           masked(websocket.Pong, ""),
			"empty fragments": masked(partMore, ""),
		} {
			r := s.socket("")
			began := time.Now()
			wg.Go(func() { // ends with the connection
				// A fragment without a beginning would be a breach of the protocol, which ends the connection at once.
				if frame[0] == partMore {
					_, _ = r.Write([]byte(masked(partText, "")))
				}

				block := []byte(strings.Repeat(frame, 1000))
				for {
					if _, err := r.Write(block); err != nil {
						return
					}
				}
			})

			wg.Go(func() {
				defer r.Close()
				limited := 0
				for {
					opcode, payload, err := r.frame()
					if err != nil {
						t.Errorf("%s: after %d errors: %v", name, limited, err)
						return
					}
					if bytes.HasPrefix(payload, []byte(`{"type":"error","code":"rate_limited"`)) {
						limited++
					}

					if opcode == websocket.Close {
						if code := binary.BigEndian.Uint16(payload); code != 1008 || limited != bounds.Errors.Max {
							t.Errorf("%s: closed with %d after %d errors, want 1008 after %d",
								name, code, limited, bounds.Errors.Max)
						}

						break
					}
				}

				// The client was read at the allowed rate if it was throttled at least nineteen times.
				if took := time.Since(began); took < time.Duration(bounds.Errors.Max-1)*throttleTime {
					t.Errorf("%s: closed after only %s", name, took)
				}
			})
		}

		wg.Wait()
		s.settles(0)
	})
}

// A client that repeats long lists is read more slowly. It gets no error, and in the end all its messages are answered.
func TestLongListsAreReadSlowly(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		const most, lists = 100, 40
		pages := strings.Repeat(`"a page that is listed again and again",`, most)
		list := masked(websocket.Text, `{"type":"subscribe","pages":[`+strings.TrimSuffix(pages, ",")+`]}`)

		r := s.socket("")
		defer r.Close()
		began := time.Now()
		go func() { // ends with the connection
			_, _ = r.Write([]byte(strings.Repeat(list, lists) + masked(websocket.Text, heartbeatMsg)))
		}()

		for {
			_, payload, err := r.frame()
			if err != nil || bytes.Contains(payload, []byte(`"error"`)) {
				t.Fatalf("got %s, %v; want no error", payload, err)
			}
			if bytes.HasPrefix(payload, []byte(`{"type":"heartbeat"`)) {
				break
			}
		}

		// The names of the burst cost no time.
		beyond := time.Duration(lists*most - bounds.Names.Burst)
		if least := beyond * bounds.Names.Every; time.Since(began) < least*9/10 {
			t.Errorf("%d names were read within %s, want at least %s", lists*most, time.Since(began), least)
		}
	})
}

// The data that the client of an event stream sends is ignored, and is read no faster than that of other clients.
func TestEventStreamThatTalks(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		r := s.open("/p/counter/events", "")
		r.response(200)

		sent, end := 0, time.Now().Add(500*time.Millisecond)
		block := make([]byte, 64<<10)
		for time.Now().Before(end) {
			_ = r.SetWriteDeadline(end)
			n, err := r.Write(block)
			sent += n
			if err != nil {
				break
			}
		}

		most := (bounds.Messages.Burst + bounds.Messages.PerSecond) * 8 << 10
		if sent > most+32<<20 { // and what the buffers of the sockets hold
			t.Fatalf("%d bytes were read in half a second, want at most %d and the buffers", sent, most)
		}

		_ = r.Close()
		s.settles(0)
	})
}

// onPages returns a message about the pages with these numbers.
func onPages(kind string, from, to int) []byte {
	var pages []string
	for i := from; i < to; i++ {
		pages = append(pages, fmt.Sprintf("\"p%d\"", i))
	}
	return []byte(masked(websocket.Text, `{"type":"`+kind+`","pages":[`+strings.Join(pages, ",")+`]}`))
}

// The limit on new pages is one of the address: it does not begin anew with each connection.
func TestNewPagesOfAnAddressAreLimited(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		s.g.newTopics[0] = bounds.NewRates(&bounds.Bound{
			Each: bounds.Address, Rate: limit.Rate{Every: time.Minute, Burst: 100},
		})

		first, second := s.socket(""), s.socket("")
		first.write(onPages("subscribe", 0, 100))
		first.expect(websocket.Text, `{"type":"count"`)
		// The first client has used up the burst. If the limit belonged to the connection, its end would set the limit
		// back.
		_ = first.Close()

		second.write(onPages("subscribe", 100, 200))
		second.expect(websocket.Text, `{"type":"error","code":"rate_limited"`)
		second.write([]byte(masked(websocket.Text, `{"type":"join","page":"new"}`)))
		limited := fmt.Sprintf(`{"type":"error","code":"rate_limited","message":%q}`, bounds.NewTopics.Says)
		second.expect(websocket.Text, limited) // without a page in it: a client would give that page up

		// Event streams and requests count as well.
		for n, path := range []string{"/%s/counter/events", "/%s/counter", "/-/counters?page=%s", "/%s/badge.svg"} {
			for i := 0; ; i++ {
				resp, err := http.ReadResponse(s.open(fmt.Sprintf(path, fmt.Sprint(n, "-", i)), "").in, nil)
				if err != nil {
					t.Fatal(err)
				}

				if resp.StatusCode == http.StatusTooManyRequests {
					break
				}
				if resp.StatusCode != http.StatusOK || i > 150 {
					t.Fatalf("%s, number %d: %s, want a refusal after 100 or so", path, i, resp.Status)
				}
			}
		}
	})
}

// A client that subscribes to new pages without end gets errors, and its other pages stay as they are. Pages that the
// gateway has already cost nothing.
func TestNewPagesAreLimited(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		r, other := s.socket(""), s.socket("")

		other.write(onPages("subscribe", 300, 350))
		began := time.Now()
		const before = 50 + 2 // the pages of the other client, and the unread record of each client
		testkit.Eventually(t, "the other's pages", func() bool { return s.g.hub.Wanted() == before })

		// These pages use up the burst.
		for i := range bounds.NewTopics.Burst / 100 {
			r.write(onPages("subscribe", 100*i, 100*i+100))
			testkit.Eventually(t, "its pages", func() bool { return s.g.hub.Wanted() == before+100 })
			r.write(onPages("unsubscribe", 100*i, 100*i+100))
			testkit.Eventually(t, "that they are left", func() bool { return s.g.hub.Wanted() == before })
		}

		// From here on each round asks for 90 new pages, faster than the rate permits.
		refused := false
		for from := 400; !refused; from += 100 {
			admitted := bounds.NewTopics.Burst/100*100 + (from-400)/100*90
			seconds := 1 + int(time.Since(began).Seconds())
			if most := bounds.NewTopics.Burst + bounds.NewTopics.PerSecond*seconds; admitted > most {
				t.Fatalf("%d new pages were admitted, want %d at most", admitted, most)
			}

			r.write(onPages("unsubscribe", from-100, from-10))
			r.write(onPages("subscribe", from, from+90))
			r.write([]byte(masked(websocket.Text, heartbeatMsg)))

			for answered := false; !answered; {
				_, text, err := r.frame()
				if err != nil {
					t.Fatal(err)
				}
				if bytes.Contains(text, []byte(`"error"`)) {
					refused = true
					if !bytes.Contains(text, []byte(calls.CodeRateLimited)) {
						t.Fatalf("got %s, want %s", text, calls.CodeRateLimited)
					}
				}
				answered = bytes.HasPrefix(text, []byte(heartbeatMsg))
			}
		}

		// The refused frames have changed nothing: those pages of them that would have fitted were given back.
		testkit.Eventually(t, "as many topics as before", func() bool { return s.g.hub.Wanted() == before })
		r.write(onPages("subscribe", 300, 350))
		r.expect(websocket.Text, `{"type":"count"`)

		_, _ = r.Close(), other.Close()
		s.settles(0)
	})
}
