package gateway

import (
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/testkit"
)

var soak = flag.Int("soak", 4_000, "connections that come and go in TestClockSoak")

// rest waits until all connections have ended, and returns the size of the heap.
func (s *served) rest() uint64 {
	s.t.Helper()
	s.settles(0)
	testkit.Eventually(s.t, "users, pages and topics to be forgotten", func() bool {
		return s.g.roster.Idle() && s.g.hub.Topics() == 0
	})
	time.Sleep(lingerClose) // connections that have just ended may have timers of this length
	for range 3 {           // a sync.Pool is emptied by the second collection
		runtime.GC()
	}

	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Connections that come and go in every way leave nothing behind: no goroutine, no descriptor, no memory. `go test -run
// TestClockSoak -timeout 1h ./gateway -soak 1000000` makes a million of them.
func TestClockSoak(t *testing.T) {
	s := serveGateway(t, true, nil)
	all := ends(t, testkit.Timeout) // another test checks how soon they end
	delete(all, "long ping")        // that client waits for a second
	ways := slices.Collect(maps.Values(all))
	n := 0
	come := func(more int) {
		for until := n + more; n < until; {
			t.Run("", func(t *testing.T) { // the end of the subtest forgets its connections
				var clients, here atomic.Int64
				here.Store(int64(n))
				visitors := &served{t: t, g: s.g, addr: s.addr, dial: dialFrom(s.addr, func() net.Addr {
					// The system reserves a pair of addresses and ports for a while, so each client has its own.
					i := int(here.Load()) + int(clients.Add(1))
					return &net.TCPAddr{IP: net.IPv4(127, byte(1+i/62_500%250), byte(i/250%250), byte(1+i%250))}
				})}

				var group sync.WaitGroup
				for range 32 {
					group.Go(func() {
						for range 128 {
							i := int(here.Add(1))
							page := fmt.Sprint("p", i%40)
							if i%8 == 0 {
								visitors.visitWithoutSocket(page)
							} else {
								visitors.visit(page, ways[i%len(ways)])
							}
						}
					})
				}
				group.Wait()
				n = int(here.Load())
			})
		}
	}

	come(min(*soak, 20_000)) // by then every table has its final size
	heap := s.rest()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)

	began := time.Now()
	come(*soak)
	took := time.Since(began)

	after := s.rest()
	testkit.Eventually(t, "no more goroutines than before",
		func() bool { return runtime.NumGoroutine() <= goroutines+2 })
	testkit.Eventually(t, "no more files than before", func() bool { return openFiles(t) <= files+2 })

	t.Logf("%d connections at %.0f/s: heap %d KB, then %d KB; %d goroutines, then %d",
		*soak, float64(*soak)/took.Seconds(),
		heap>>10, after>>10, goroutines, runtime.NumGoroutine())

	// Tables keep their size, however many connections come.
	if allowed := heap + 512<<10 + min(uint64(*soak)*50, 4<<20); after > allowed {
		t.Errorf("the heap has grown from %d to %d bytes, want %d at most", heap, after, allowed)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}

	return len(entries)
}
