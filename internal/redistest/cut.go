package redistest

import (
	"bytes"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"testing"
)

// Cuts counts how many connections proxies still have to cut, and how many runs of scripts they have passed on.
type Cuts struct{ left, scripts atomic.Int64 }

// every says which runs of scripts are cut: every fifth.
const every = 5

// Left returns how many connections are still to be cut.
func (c *Cuts) Left() int64 { return max(0, c.left.Load()) }

// due counts a run of a script, and reports whether its answer is to be cut off.
func (c *Cuts) due() bool {
	if c.scripts.Add(1)%every != 0 || c.left.Load() <= 0 {
		return false
	}
	return c.left.Add(-1) >= 0
}

// proxy starts a proxy in front of a server and returns its port. It closes some connections instead of passing on the
// answer to a run of a script: the server has executed the script, and the client cannot know.
func proxy(t testing.TB, server string, cuts *Cuts) (port string) {
	t.Helper()

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })

	go func() { // ends with the listener; the goroutines that it starts end when either side closes its connection
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			go forward(client, server, cuts)
		}
	}()

	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

func forward(client net.Conn, address string, cuts *Cuts) {
	defer client.Close()

	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()

	// Set by the goroutine that reads requests, and read by the one that passes answers on.
	var cut atomic.Bool

	go func() {
		defer server.Close()
		var chunk [64 << 10]byte
		for {
			n, err := client.Read(chunk[:])
			sent := chunk[:n]
			isScript := bytes.Contains(sent, []byte("evalsha"))
			isProbe := bytes.Contains(sent, []byte("setrange")) // a check whether the master accepts writes
			if isScript && !isProbe && cuts.due() {
				cut.Store(true)
			}

			if _, failed := server.Write(sent); err != nil || failed != nil {
				return
			}
		}
	}()

	// An answer that is cut off ends the copy, and so both connections.
	_, _ = io.Copy(writer(func(answer []byte) (int, error) {
		if cut.Load() {
			return 0, io.EOF
		}
		return client.Write(answer)
	}), server)
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// Cut puts a proxy in front of the server that cuts n connections, each after it has delivered a script, and returns
// the URL through it.
func (s *Server) Cut(t testing.TB, n int) (url string, cuts *Cuts) {
	t.Helper()

	cuts = &Cuts{}
	cuts.left.Store(int64(n))

	return "redis://127.0.0.1:" + proxy(t, s.Addr, cuts) + "/0", cuts
}

// Cut does the same as Server.Cut. From now on the sentinels return the proxy as the master.
func (s *Sentinel) Cut(t testing.TB, n int) (url string, cuts *Cuts) {
	t.Helper()

	cuts = &Cuts{}
	cuts.left.Store(int64(n))

	port := proxy(t, s.Master.Addr, cuts)
	// All of them, because a client may ask any sentinel for the master.
	for _, sentinel := range s.Sentinels {
		sentinel.Do(t, "SENTINEL", "REMOVE", MasterName)
		sentinel.Do(t, "SENTINEL", "MONITOR", MasterName, "127.0.0.1", port, 2)
	}

	return s.URL(), cuts
}

// Cut does the same as Server.Cut. From now on the servers announce their proxies to clients.
func (c *Cluster) Cut(t testing.TB, n int) (url string, cuts *Cuts) {
	t.Helper()

	cuts = &Cuts{}
	cuts.left.Store(int64(n))

	for _, s := range c.all() {
		s.Do(t, "CONFIG", "SET", "cluster-announce-port", proxy(t, s.Addr, cuts))
	}

	return c.URL(), cuts
}

// Migrate moves a slot to the master number to from the one that has it, a few keys at a time, while clients use it.
func (c *Cluster) Migrate(t testing.TB, slot, to int) {
	t.Helper()

	target := c.Masters[to]
	targetID := target.Do(t, "CLUSTER", "MYID")
	// Any of them may have the slot, because an earlier test may have moved it.
	for _, source := range c.Masters {
		id := source.Do(t, "CLUSTER", "MYID")
		if id == targetID || !source.owns(t, slot) {
			continue
		}

		// Redis requires this order: the target must expect the slot before the source sends clients there.
		target.Do(t, "CLUSTER", "SETSLOT", slot, "IMPORTING", id)
		source.Do(t, "CLUSTER", "SETSLOT", slot, "MIGRATING", targetID)

		// A few keys at a time, so that clients meet a slot that is half here and half there.
		for {
			keys := source.Do(t, "CLUSTER", "GETKEYSINSLOT", slot, 3).([]any)
			if len(keys) == 0 {
				break
			}
			source.Do(t, append([]any{"MIGRATE", host, target.port, "", 0, 5000, "KEYS"}, keys...)...)
		}

		target.Do(t, "CLUSTER", "SETSLOT", slot, "NODE", targetID)
		// A master that does not know would still send clients to the former one.
		for _, s := range c.Masters {
			s.Do(t, "CLUSTER", "SETSLOT", slot, "NODE", targetID)
		}
		return
	}
}

// owns reports whether the server believes that it has the slot.
func (s *Server) owns(t testing.TB, slot int) bool {
	t.Helper()
	id := s.Do(t, "CLUSTER", "MYID")

	for _, line := range s.Do(t, "CLUSTER", "SLOTS").([]any) {
		f := line.([]any)
		if f[0].(int64) <= int64(slot) && int64(slot) <= f[1].(int64) {
			return f[2].([]any)[2] == id
		}
	}

	return false
}
