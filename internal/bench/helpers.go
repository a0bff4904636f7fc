//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"headcount/internal/servertest"
)

const (
	subscribers = 5_000
	floorTime   = 2 * time.Second
	tick        = 0.01 // seconds, the unit in which /proc reports CPU time
)

// frame is as long as the count frames of the simulator's pages.
var frame = bytes.Repeat([]byte("x"), 127)

// floor writes frames to all subscribers, round after round with a pause in between. Each frame costs one system call
// and nothing else.
func floor(args []string) error {
	subscribers, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	pause, err := time.ParseDuration(args[2])
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	defer l.Close()

	fds := make([]int, 0, subscribers)
	for range subscribers {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		defer c.Close()

		fd, err := descriptor(c.(*net.TCPConn))
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}

	// The readers share one core, and are busy until all have connected.
	time.Sleep(500 * time.Millisecond)
	began := time.Now()
	before := cpuTime(os.Getpid())
	written := 0

	for next := began; time.Since(began) < floorTime; {
		for _, fd := range fds {
			// A raw system call does not involve Go's scheduler.
			n, _, errno := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&frame[0])),
				uintptr(len(frame)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
			// The kernel accepts less, or nothing, for a full socket; only whole frames are deliveries.
			if errno == 0 && int(n) == len(frame) {
				written++
			}
		}

		next = next.Add(pause)
		if time.Until(next) > 0 {
			time.Sleep(time.Until(next))
		} else {
			// After a round that was longer than the pause, the next ones do not catch up.
			next = time.Now()
		}
	}

	return report(figures{
		"per_s":             float64(written) / time.Since(began).Seconds(),
		"cpu_s_per_million": (cpuTime(os.Getpid()) - before) / float64(written) * 1e6,
	})
}

// descriptor returns the file descriptor of a connection. floor writes to it, so that it does not measure Go's net
// package.
func descriptor(c *net.TCPConn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}

	err = raw.Control(func(number uintptr) { fd = int(number) })

	return fd, err
}

// readers runs subscribers that only read, with a goroutine each, as the simulator's do. They end when the server ends.
func readers(args []string) error {
	subscribers, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}

	var group sync.WaitGroup
	defer group.Wait()
	for range subscribers {
		c, err := dial(args[0])
		if err != nil {
			return err
		}
		group.Go(func() {
			defer c.Close()
			buf := make([]byte, 4096)
			for {
				if _, err := c.Read(buf); err != nil {
					return
				}
			}
		})
	}

	return nil
}

// dial connects, and waits until the server, which may still be starting, listens. The connection will end with a
// reset, so that its port is free for the next run.
func dial(addr string) (c net.Conn, err error) {
	for range 100 {
		c, err = net.DialTimeout("tcp", addr, time.Minute)
		if err == nil {
			return c, c.(*net.TCPConn).SetLinger(0)
		}
		time.Sleep(20 * time.Millisecond)
	}

	return nil, err
}

// arriving is how many clients connect, if so many files may be open. arrivingAtOnce of them connect at a time, which
// is fewer than the server has room for newcomers. All clients share a core, so some send their handshake late, and a
// server without room closes connections that have sent nothing.
const arriving, arrivingAtOnce = 16_000, 1_000

// arrive connects all clients to a server and waits until all have received a frame of a type, the last one that
// welcomes a client. args are the server's URL, its process id and the type.
func arrive(args []string) error {
	u, err := url.Parse(args[0])
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}

	n := min(arriving, mostSockets())
	handshake := handshakeOf(u.Host)

	// Each goroutine writes its own element, so they need no lock.
	took := make([]time.Duration, n)
	errs := make([]error, n)
	var group sync.WaitGroup
	room := make(chan struct{}, arrivingAtOnce)
	var again atomic.Int64 // connections that the clients had to open again
	began := time.Now()
	before := cpuTime(pid)

	for i := range n {
		group.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()

			// A server that had no room for a late handshake has closed the connection, so the client tries again.
			for tries := 0; tries == 0 || errs[i] != nil && tries < 20; tries++ {
				again.Add(int64(min(tries, 1)))
				errs[i] = welcomed(u.Host, handshake, args[2])
			}
			took[i] = time.Since(began)
		})
	}

	group.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}

	cpu := cpuTime(pid) - before
	return report(figures{
		"connections": float64(n),
		"again":       float64(again.Load()),
		"all_after_s": slices.Max(took).Seconds(),
		"per_cpu_s":   float64(n) / cpu,
		"cpu_us_each": cpu / float64(n) * 1e6,
		"rss_most_mb": mostMemory(pid) / 1e6,
	})
}

// handshakeOf returns the request that opens a WebSocket to a host.
func handshakeOf(host string) string {
	return "GET /-/ws HTTP/1.1\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" +
		"Sec-WebSocket-Protocol: headcount.v1\r\n\r\n"
}

// welcomed opens a WebSocket and waits for a frame of a type. The WebSocket stays open until the process ends.
func welcomed(addr, handshake, frame string) error {
	c, err := dial(addr)
	if err != nil {
		return err
	}

	var got []byte
	_, err = io.WriteString(c, handshake)
	buf := make([]byte, 1024)
	// The frame may come in several reads, or together with the answer to the handshake.
	for err == nil && !bytes.Contains(got, []byte(`"type":"`+frame+`"`)) {
		var n int
		n, err = c.Read(buf)
		got = append(got, buf[:n]...)
	}

	if err != nil {
		_ = c.Close()
		return fmt.Errorf("%w after %q", err, got)
	}

	return nil
}

func report(f figures) error { return json.NewEncoder(os.Stdout).Encode(f) }

// cpuTime returns the CPU time that the process has used, in seconds; 0 when it has ended.
func cpuTime(pid int) float64 { return servertest.Stat(pid).CPUTime() }

// mostMemory returns the most resident memory that the process ever had, in bytes.
func mostMemory(pid int) float64 {
	p, err := procfs.NewProc(pid)
	if err != nil {
		return 0
	}

	status, _ := p.NewStatus() // after an error all of it is 0
	return float64(status.VmHWM)
}
