package programtest

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
)

// ports are those that FreeAddr has given, so that it gives none twice.
var ports struct {
	sync.Mutex
	taken map[int]bool
}

// FreeAddr is an address of the loopback that nobody else takes, also while the
// process it is for is down: connections to others get ports above these.
func FreeAddr() string {
	ports.Lock()
	defer ports.Unlock()
	if ports.taken == nil {
		ports.taken = map[int]bool{}
	}
	for {
		port := 12000 + rand.IntN(20000)
		addr := "127.0.0.1:" + strconv.Itoa(port)
		tcp, err := net.Listen("tcp", addr)
		if ports.taken[port] || err != nil {
			if err == nil {
				_ = tcp.Close()
			}
			continue
		}
		udp, err := net.ListenPacket("udp", addr)
		_ = tcp.Close()
		if err != nil {
			continue
		}
		_ = udp.Close()
		ports.taken[port] = true
		return addr
	}
}
