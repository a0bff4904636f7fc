package conn

import (
	"errors"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/websocket"
)

// frames serves the complete frames at the beginning of data and returns the remaining
// bytes. They are less than one frame, unless reading is blocked.
func (c *conn) frames(data []byte) (rest []byte, err error) {
	for len(data) > 0 {
		switch {
		case c.speech == stream: // the server ignores what the client of an event stream sends
			return nil, nil
		case c.closing.Load() != open:
			// After the gateway's close frame only the client's matters.
			n, closed := c.reader.Skip(data)
			if closed {
				c.finish(answered)
				return nil, nil
			}
			if n == 0 {
				return data, nil
			}
			data = data[n:]
			continue

		case c.blocked():
			return data, nil
		}

		f, n, breach := c.reader.Next(data)
		switch {
		case breach != nil: // Skip reads the bytes of this frame
			if err := c.breach(breach); err != nil {
				return nil, err
			}
		case n == 0:
			return data, nil
		default:
			err := c.frame(f)
			// Before the error is looked at: the memory of a message in fragments goes back to its pool.
			f.Release()
			if err != nil {
				return nil, err
			}
			data = data[n:]
		}
	}

	return nil, nil
}

// frame serves one frame, or one fragment of a message. Every frame shows that the
// client is alive.
func (c *conn) frame(f websocket.Frame) error {
	c.MarkAlive()
	if !c.charge(f.Kind) {
		c.throttle()
		return c.fault(faultBeyond(bounds.Messages))
	}

	switch f.Kind {
	case websocket.Text:
		return c.text(f.Payload)
	case websocket.Binary:
		return c.fault(faultOf(calls.ErrMedia, "binary messages have no meaning here; send JSON text"))
	case websocket.Ping:
		return c.send(websocket.Pong, f.Payload)
	case websocket.Close:
		state := answered
		if c.closing.CompareAndSwap(open, closeSent) { // otherwise the gateway began to close at this moment
			state = leftFirst
		}

		// The answer repeats the client's code and reason.
		err := c.wire.End(websocket.AppendFrame(nil, websocket.Close, f.Payload))
		c.finish(state)

		return err
	default:
		return nil // a fragment of a message, or a pong
	}
}

// breach closes the connection of a client that violated the protocol.
func (c *conn) breach(err *websocket.Error) error {
	// The error goes first: nothing is written after the close frame.
	if err.Code == websocket.StatusTooBig {
		if err := c.fault(faultOf(calls.ErrTooLarge, "a message is at most 4096 bytes")); err != nil {
			return err
		}
	}
	return c.end(err.Code, err.Reason, nil)
}

// text serves one message. The client gets an error frame for a mistake of its own; any
// other error ends the connection.
func (c *conn) text(text []byte) error {
	m, err := c.dialect().parse(text)
	if err == nil {
		err = c.do(m)
	}

	var f *fault
	if errors.As(err, &f) {
		return c.fault(f)
	}

	return err
}

// send writes one frame.
func (c *conn) send(opcode byte, payload []byte) error {
	return c.wire.Write(websocket.AppendFrame(nil, opcode, payload))
}

// fault sends the client an error frame. It closes the connection at the twentieth
// error.
func (c *conn) fault(f *fault) error {
	c.all.countFault(f)

	if line := c.all.cfg.Log.Debug(); line.Enabled() {
		line.Str("reason", f.code).Str("detail", httppolicy.Unquoted(f.message)).Msg("a message was refused")
	}

	if err := c.wire.Write(c.dialect().appendFault(nil, f)); err != nil {
		return err
	}

	// After a message that is too large breach ends the connection in any case.
	c.errors++
	if int(c.errors) < bounds.Errors.Max || f.code == calls.CodeTooLarge {
		return nil
	}

	return c.end(websocket.StatusPolicyViolation, "too many errors", faultBeyond(bounds.Errors))
}

// end sends the fault that ends the connection, if there is one, and a close frame. The client
// then has a short time to close its side. An event stream is closed at once.
func (c *conn) end(code int, reason string, last *fault) error {
	// An event stream has no frames, so its end is all that can be said.
	if c.speech == stream {
		return c.wire.Close()
	}

	if !c.closing.CompareAndSwap(open, closeSent) {
		return nil // one end is under way already
	}

	// One write for both, so that nothing comes between the fault and the close frame.
	var b []byte
	if last != nil {
		c.all.countFault(last)
		b = c.dialect().appendFault(b, last)
	}

	err := c.wire.End(websocket.AppendClose(b, c.dialect().closeCode(code, last), reason))
	if !c.wire.Busy() { // otherwise Freed does it when the client has taken the close frame
		c.awaitClose()
	}

	return err
}
