//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

const patience = 5 * time.Second // of an ordinary client

// client is a WebSocket that knows no more of the protocol than it needs. One
// goroutine uses it.
type client struct {
	net.Conn
	in *bufio.Reader
}

const upgrade = "GET /-/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

// secure stands before the address of a server that speaks TLS.
const secure = "https://"

// neighbour is where ordinary clients come from: what the address of the attackers may do is none of
// their business.
var neighbour = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}

// connect opens a connection, over TLS if addr says so. protocols are those of TLS.
func connect(from *net.TCPAddr, addr string, within time.Duration, protocols ...string) (net.Conn, error) {
	addr, overTLS := strings.CutPrefix(addr, secure)
	dialer := net.Dialer{Timeout: within}
	if from != nil {
		dialer.LocalAddr = from
	}
	c, err := dialer.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	_ = c.(*net.TCPConn).SetLinger(0) // so that its port is free at once
	if overTLS {
		return tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: protocols}), nil
	}
	return c, nil
}

// dial opens a WebSocket.
func dial(from *net.TCPAddr, addr string) (*client, error) {
	c, err := connect(from, addr, patience)
	if err != nil {
		return nil, err
	}
	w := &client{c, bufio.NewReaderSize(c, 4096)}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err = io.WriteString(c, upgrade); err == nil {
		var resp *http.Response
		if resp, err = http.ReadResponse(w.in, nil); err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
			err = fmt.Errorf("status %d", resp.StatusCode)
		}
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return w, nil
}

// frame is a masked frame of up to 65,535 bytes; its mask is 0.
func frame(first byte, payload string) []byte {
	b := []byte{first, 0x80 | byte(len(payload))}
	if len(payload) > 125 {
		b[1] = 0x80 | 126
		b = binary.BigEndian.AppendUint16(b, uint16(len(payload)))
	}
	return append(append(b, 0, 0, 0, 0), payload...)
}

func text(format string, args ...any) []byte { return frame(0x81, fmt.Sprintf(format, args...)) }

// next reads one frame and answers it if it is a ping.
func (c *client) next() (payload []byte, err error) {
	var head [4]byte
	if _, err = io.ReadFull(c.in, head[:2]); err != nil {
		return nil, err
	}
	n := int(head[1])
	if n == 126 {
		if _, err = io.ReadFull(c.in, head[2:]); err != nil {
			return nil, err
		}
		n = int(binary.BigEndian.Uint16(head[2:]))
	}
	payload = make([]byte, n)
	if _, err = io.ReadFull(c.in, payload); err == nil && head[0] == 0x89 {
		_, err = c.Write(frame(0x8a, string(payload)))
	}
	return payload, err
}

// await reads until the page's count is want, or any if want is negative.
func (c *client) await(page string, want int) error {
	_ = c.SetDeadline(time.Now().Add(patience))
	for {
		payload, err := c.next()
		if err != nil {
			return err
		}
		if !bytes.HasPrefix(payload, []byte(`{"type":"count"`)) {
			continue
		}
		var f struct {
			Page  string
			Count int
		}
		if json.Unmarshal(payload, &f) == nil && f.Page == page && (want < 0 || f.Count == want) {
			return nil
		}
	}
}

// ordinary are clients that do nothing wrong.
type ordinary struct {
	addr  string
	stays *client // stays is on its page, and is the 1 that its count shows
	sees  *client
	likes http.Client
	n     int
}

func newOrdinary(addr string) *ordinary {
	return &ordinary{addr: addr, likes: http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext:     (&net.Dialer{LocalAddr: neighbour}).DialContext,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}}
}

// call makes a request and reads the answer, whose status is 200.
func (o *ordinary) call(method, path string, answer any) error {
	url := o.addr
	if !strings.HasPrefix(url, secure) {
		url = "http://" + url
	}
	req, err := http.NewRequest(method, url+path, nil)
	if err != nil {
		return err
	}
	resp, err := o.likes.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: status %d", method, path, resp.StatusCode)
	}
	return json.NewDecoder(resp.Body).Decode(answer)
}

func (o *ordinary) open() (err error) {
	if o.stays, err = dial(neighbour, o.addr); err == nil {
		if o.sees, err = dial(neighbour, o.addr); err == nil {
			_, err = o.stays.Write(text(`{"type":"join","page":"stays"}`))
		}
	}
	if err == nil {
		err = o.stays.await("stays", 1)
	}
	_ = o.stays.SetDeadline(time.Time{})
	go func() { // ends with close
		for err := error(nil); err == nil; {
			_, err = o.stays.next()
		}
	}()
	return err
}

func (o *ordinary) close() { _, _ = o.stays.Close(), o.sees.Close() }

// measured is what ordinary clients felt, and how many of them did not get what they wanted.
type measured struct {
	seen, first, liked times
	lost               int
}

// measure has newcomers come, one after the other. Each must get its first count, another
// client must see it, and a like of a visitor must count.
func (o *ordinary) measure(ctx context.Context, d time.Duration) (m measured) {
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		o.n++
		page := fmt.Sprintf("ordinary %d", o.n)
		came := time.Now()
		_ = o.sees.SetDeadline(came.Add(patience)) // that of the last measurement may be over
		c, err := dial(neighbour, o.addr)
		connected := time.Since(came)
		if err == nil {
			if _, err = o.sees.Write(text(`{"type":"subscribe","pages":[%q]}`, page)); err == nil {
				err = o.sees.await(page, 0)
			}
			time.Sleep(300 * time.Millisecond) // or the page's next count would wait for the interval
			joined := time.Now()
			if err == nil {
				_, err = c.Write(text(`{"type":"join","page":%q}`, page))
			}
			if err == nil {
				err = c.await(page, 1)
			}
			firstAt := time.Now()
			if err == nil {
				err = o.sees.await(page, 1)
			}
			if err == nil {
				m.seen, m.first = append(m.seen, time.Since(joined)), append(m.first, connected+firstAt.Sub(joined))
				_, err = o.sees.Write(text(`{"type":"unsubscribe","pages":[%q]}`, page))
			}
			if likes := time.Now(); err == nil && o.n%2 == 0 { // an address without identity may do it ten times a second
				var liked struct{ Value int }
				if err = o.call(http.MethodPut, fmt.Sprintf("/api/v1/counters/likes:%d/members/me", o.n), &liked); err == nil && liked.Value != 1 {
					err = fmt.Errorf("%d likes", liked.Value)
				}
				m.liked = append(m.liked, time.Since(likes))
			}
			_ = c.Close()
		}
		if err != nil {
			m.lost++
		}
	}
	slices.Sort(m.seen)
	slices.Sort(m.first)
	slices.Sort(m.liked)
	return m
}

// count is the count of the page on which one ordinary client stays.
func (o *ordinary) count() (int, error) {
	var c struct{ Count int }
	err := o.call(http.MethodGet, "/stays/counter", &c)
	return c.Count, err
}

// list returns n pages in JSON whose names begin with name.
func list(name string, n int) string {
	pages := make([]string, n)
	for i := range pages {
		pages[i] = fmt.Sprintf("%q", fmt.Sprintf("%s%d", name, i))
	}
	return "[" + strings.Join(pages, ",") + "]"
}
