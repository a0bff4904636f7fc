package servertest

import (
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// Ports are given from this range. It is below the one from which the system
// takes ports for outgoing connections, so no connection takes the port of a
// server that is down for a moment. Nor do the tests of another package, which
// run meanwhile as a process of their own: a port is claimed before it is tried.
const firstPort, endPort = 12000, 32000

// ports are those that this process has claimed, so that none is given twice;
// at most all of the range. A claim that nothing points to would be collected.
var ports struct {
	sync.Mutex
	claims map[int]io.Closer
}

// FreeAddr returns an address of the loopback for a server. It stays the
// server's own, also while the server is down.
func FreeAddr() string { return addr(FreePort()) }

// FreePort returns a port for a server, as FreeAddr does. The ports that are
// beside it by so much are the server's as well.
func FreePort(beside ...int) int {
	ports.Lock()
	defer ports.Unlock()
	if ports.claims == nil {
		ports.claims = map[int]io.Closer{}
	}

search:
	for {
		// At random, because tests of several packages run at once, and would all begin with the first one.
		port := firstPort + rand.IntN(endPort-firstPort)
		all := []int{port}
		for _, d := range beside {
			all = append(all, port+d)
		}

		for _, p := range all {
			if p >= endPort || ports.claims[p] != nil {
				continue search
			}

			// Claimed before it is tried: trying opens it for a moment, in which another process would find it in use.
			c := claim(p)
			if c == nil {
				continue search
			}

			ports.claims[p] = c // also when its neighbour is not ours: there are many
			// A program that claims nothing, such as a server of the machine, may listen there.
			if !free(addr(p)) {
				continue search
			}
		}

		return port
	}
}

func addr(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// free reports whether a server can listen there now, with TCP and with UDP.
func free(addr string) bool {
	// A process that is started meanwhile would inherit the sockets, and keep the port in use.
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
