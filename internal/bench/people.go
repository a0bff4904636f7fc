//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"headcount/client"
	"headcount/internal/benchenv"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

const (
	peoplePages    = 10_000           // each is followed by all servers
	arrivalsPerSec = 1_000            // of all people together; more fill the core of seven servers
	joinsAtOnce    = 256              // of one process of clients
	rightWithin    = time.Minute      // after the last join; then something is wrong
	settleTime     = 30 * time.Second // two pings each, and time to return the memory of the arrival
)

// peopleText is what the page says about people.
const peopleText = "\nPeople: a server may open 20,000 files here, so there are several. Every page is followed by " +
	"all of them, so each join is sent to all, and the servers' core\nis full at 1,000 arrivals a second: there it " +
	"bends, before memory, Redis or the clients. 250,000 would need 16 such servers, 2 GB of theirs and 2 GB of the " +
	"kernel's,\nand two cores for 1,000 arrivals a second; with `ulimit -n 320000` one server of 0.8 GB does it, for " +
	"a tenth of the CPU. One source address has ports for 14,000\nconnections to a server before the system searches " +
	"for them at length, which only clients on one machine meet.\n"

// people lets very many users join pages that all servers share. One process may not open that many files, so there are
// several servers over one Redis, and as many processes of clients, each with source addresses of its own.
func people(t *trial) figures {
	each := mostSockets()
	processes := (t.people + each - 1) / each
	redis := redistest.Start(t)

	servers := make([]server, processes)
	var pids []int
	for i := range servers {
		servers[i] = t.serve("--redis", redis.URL(), "--cluster-listen", servertest.FreeAddr())
		pids = append(pids, servers[i].PID())
	}
	time.Sleep(5 * time.Second) // until each server owns its partitions

	before := cpuOf(pids)
	redisBefore := cpuTime(redis.PID())
	parties := make([]*json.Decoder, processes)
	for i, s := range servers {
		parties[i] = t.party(s, i, processes)
	}

	var lastJoin, lastRight float64
	for _, party := range parties {
		var f figures
		if err := party.Decode(&f); err != nil {
			t.Fatal(fmt.Errorf("people: %w", err))
		}
		lastJoin = max(lastJoin, f["last_join_ms"])
		lastRight = max(lastRight, f["last_right_ms"])
	}

	n := float64(t.people)
	f := figures{
		"users":             n,
		"processes":         float64(processes),
		"right_after_s":     (lastRight - lastJoin) / 1e3,
		"cpu_us_per_join":   (cpuOf(pids) - before) / n * 1e6,
		"redis_us_per_join": (cpuTime(redis.PID()) - redisBefore) / n * 1e6,
		"redis_bytes_each":  float64(servertest.Memory(redis.PID())) / n,
	}
	for _, s := range servers {
		t.hasEverybody(s)
	}

	before = cpuOf(pids)
	time.Sleep(settleTime)
	f["core_percent"] = (cpuOf(pids) - before) / settleTime.Seconds() * 100
	f["rss_mb"] = memoryOf(pids) / 1e6
	f["rss_kb_each"] = memoryOf(pids) / n / 1e3
	for _, pid := range pids {
		f["rss_most_mb"] += mostMemory(pid) / 1e6
	}

	return f
}

// party starts the clients of a server: of all people every step-th one, from the first on. The decoder reads their
// figures, which they print when the count of each is right. They stay until the trial ends.
func (t *trial) party(s server, first, step int) *json.Decoder {
	out, in := io.Pipe()
	cmd := benchenv.On(t.Context(), benchenv.ClientCore, t.self, "people", s.addr, strconv.Itoa(first),
		strconv.Itoa(step), strconv.Itoa(t.people))
	cmd.Stdout = in
	p := t.Start(cmd)

	// If the process ends without figures, the decoder must not wait for them.
	go func() { // ends with the process
		<-p.Ended()
		_ = in.Close()
	}()

	return json.NewDecoder(out)
}

// hasEverybody fails the trial unless a server counts everybody.
func (t *trial) hasEverybody(s server) {
	has := func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/*/counter", nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()

		var site client.Count
		if err := json.NewDecoder(resp.Body).Decode(&site); err != nil {
			return err
		}
		if site.Count != int64(t.people) {
			return fmt.Errorf("a server counts %d of %d people", site.Count, t.people)
		}

		return nil
	}

	if err := servertest.Await(s.Process, time.Second, has); err != nil {
		t.Fatal(err)
	}
}

func cpuOf(pids []int) (seconds float64) {
	for _, pid := range pids {
		seconds += cpuTime(pid)
	}

	return seconds
}

func memoryOf(pids []int) (bytes float64) {
	for _, pid := range pids {
		bytes += float64(servertest.Memory(pid))
	}

	return bytes
}

// crowd are the people of one process: numbers first, first+step, first+2*step and so on, below all.
type crowd struct {
	addr  string
	first int
	step  int
	all   int           // people, of all processes
	room  chan struct{} // bounds how many join at once

	right sync.WaitGroup // waits for those whose count is not right yet

	mu                  sync.Mutex // guards what follows
	lastJoin, lastRight time.Time
}

// joinPeople lets people join by a timetable, reports when the count of each is right, and then stays until it is
// killed.
func joinPeople(args []string) error {
	var numbers [3]int
	for i := range numbers {
		var err error
		numbers[i], err = strconv.Atoi(args[1+i])
		if err != nil {
			return err
		}
	}

	first, step, all := numbers[0], numbers[1], numbers[2]
	c := &crowd{addr: args[0], first: first, step: step, all: all, room: make(chan struct{}, joinsAtOnce)}
	failed := make(chan error)
	began := time.Now()

	for i := first; i < all; i += step {
		// The timetable lets all processes finish at about the same time.
		time.Sleep(time.Until(began.Add(time.Second * time.Duration(i) / arrivalsPerSec)))
		c.room <- struct{}{}
		c.right.Add(1)
		go func() { failed <- fmt.Errorf("person %d: %w", i, c.join(i)) }()
	}

	everybody := make(chan struct{})
	go func() {
		c.right.Wait()
		close(everybody)
	}()

	select {
	case err := <-failed:
		return err
	case <-time.After(rightWithin):
		return errors.New("not every count became right")
	case <-everybody:
	}

	if err := report(figures{
		"last_join_ms":  float64(c.lastJoin.UnixMilli()),
		"last_right_ms": float64(c.lastRight.UnixMilli()),
	}); err != nil {
		return err
	}

	return <-failed
}

// join connects person i, joins a page, and reads until the connection ends.
func (c *crowd) join(i int) error {
	// Each process has two addresses, from 127.0.0.2 on: after 14,000 connections from one address the system has used
	// the ports that it prefers, and begins to try them all.
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+2*c.first+i/c.step%2))}}
	conn, err := from.Dial("tcp", c.addr)
	if err != nil {
		return err
	}
	defer conn.Close()

	page := "people-" + strconv.Itoa(i%peoplePages)
	expected := int64(c.all / peoplePages)
	if i%peoplePages < c.all%peoplePages {
		expected++
	}

	join := testkit.ClientFrame(0x80|textOpcode, `{"type":"join","page":"`+page+`"}`)
	_, err = conn.Write(append([]byte(handshakeOf(c.addr)), join...))
	if err != nil {
		return err
	}
	c.note(&c.lastJoin)

	joined := sync.OnceFunc(func() { <-c.room })
	defer joined()

	r := bufio.NewReaderSize(conn, 512) // small, because there are many
	status, err := r.ReadString('\n')
	for line := status; err == nil && line != "\r\n"; {
		line, err = r.ReadString('\n')
	}
	if err != nil {
		return fmt.Errorf("after %q: %w", status, err)
	}

	return fmt.Errorf("after %q: %w", status, c.stay(conn, r, expected, joined))
}

// stay reads the frames of a person until the connection ends, and answers pings. It calls joined at the first count.
// It returns why the connection ended.
func (c *crowd) stay(conn net.Conn, r *bufio.Reader, expected int64, joined func()) error {
	isRight := sync.OnceFunc(func() {
		c.note(&c.lastRight)
		c.right.Done()
	})

	for {
		opcode, payload, err := readFrame(r)
		if err != nil {
			return err
		}

		switch opcode {
		case pingOpcode:
			if _, err := conn.Write(emptyPong); err != nil {
				return err
			}
		case closeOpcode:
			return fmt.Errorf("the server has closed with %q", payload)
		}

		var f client.Frame
		if opcode != textOpcode || client.ParseFrame(payload, &f) != nil || f.Type != "count" {
			continue
		}
		joined()
		if f.Count.Count == expected && !f.Count.Stale {
			isRight()
		}
	}
}

// note sets one of the two times to now.
func (c *crowd) note(at *time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()

	*at = time.Now()
}

const (
	textOpcode  = 1
	closeOpcode = 8
	pingOpcode  = 9
)

var emptyPong = testkit.ClientFrame(0x8a, "")

// readFrame reads a frame, which the server does not mask. The payload is valid until the next read.
func readFrame(r *bufio.Reader) (opcode byte, payload []byte, err error) {
	head, err := r.Peek(2)
	if err != nil {
		return 0, nil, err
	}

	opcode = head[0] & 0xf
	size, skip := int(head[1]), 2
	if size == 126 {
		head, err = r.Peek(4)
		if err != nil {
			return 0, nil, err
		}
		size, skip = int(binary.BigEndian.Uint16(head[2:])), 4
	}

	payload, err = r.Peek(skip + size)
	if err != nil {
		return 0, nil, err
	}
	_, _ = r.Discard(skip + size) // cannot fail after the Peek

	return opcode, payload[skip:], nil
}
