package servertest

import (
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Servers get ports from this range. It is below the range for outgoing connections, so no connection takes the port of
// a server that is down for a moment. Tests of other packages, which run meanwhile in processes of their own, do not
// take it either, because each process claims a port before it tries it.
const firstPort, endPort = 12000, 32000

// ports has the claims of this process, at most one for each port of the range. It keeps them from the garbage
// collector, which would close them.
var ports struct {
	sync.Mutex
	claims map[int]io.Closer
}

// FreeAddr returns an address of the loopback for a server. No other server gets it, even while this one is down.
func FreeAddr() string { return addr(FreePort()) }

// FreePort returns a port for a server, as FreeAddr does. For each beside, the port plus beside is the server's as
// well.
func FreePort(beside ...int) int {
	ports.Lock()
	defer ports.Unlock()
	if ports.claims == nil {
		ports.claims = map[int]io.Closer{}
	}

search:
	for {
		// At random, because the tests of several packages, which run at once, would all try the same port first.
		port := firstPort + rand.IntN(endPort-firstPort)
		all := []int{port}
		for _, d := range beside {
			all = append(all, port+d)
		}

		for _, p := range all {
			if p >= endPort || ports.claims[p] != nil {
				continue search
			}

			// Claimed before it is tried: for the moment of the trial another process would find the port in use.
			c := claim(p)
			if c == nil {
				continue search
			}

			ports.claims[p] = c // kept even if a port beside it is taken: there are many
			// A program that claims nothing, such as a service of the machine, may use it.
			if !free(addr(p)) {
				continue search
			}
		}

		return port
	}
}

func addr(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// free reports whether a server can listen on an address now, with TCP and with UDP.
func free(addr string) bool {
	// A process that was started meanwhile would inherit the sockets, and keep the port in use.
	defer holdForks()()

	tcp, err := net.Listen("tcp", addr)
	if err != nil {
		return false
	}
	defer tcp.Close()

	udp, err := net.ListenPacket("udp", addr)
	if err != nil {
		return false
	}

	_ = udp.Close()
	return true
}
