package browser

import (
	"context"
	"io"
	"net/http"
	"strings"

	"github.com/coder/websocket"
	"github.com/dop251/goja"
)

// socket opens a WebSocket for a script. on has the script's callbacks.
func (t *Tab) socket(address, protocol string, on *goja.Object) map[string]any {
	opened, received, ended := t.calling(on.Get("opened")), t.calling(on.Get("received")), t.calling(on.Get("ended"))
	ctx, cancel := context.WithCancel(t.page)
	out := make(chan string, 256) // frames to send; when it is full, the connection is closed

	t.b.work.Go(func() {
		defer t.later(func() { ended() })
		defer cancel()

		ws, _, err := websocket.Dial(ctx, address, &websocket.DialOptions{
			HTTPClient: t.b.web, Subprotocols: []string{protocol}, HTTPHeader: http.Header{"Origin": {t.origin()}},
		})
		if err != nil {
			t.b.cfg.Say(err.Error())
			return
		}
		defer ws.CloseNow()
		t.later(func() { opened() })

		t.b.work.Go(func() {
			defer cancel()
			for {
				select {
				case text := <-out:
					if ws.Write(ctx, websocket.MessageText, []byte(text)) != nil {
						return
					}
				case <-ctx.Done():
					return
				}
			}
		})

		for {
			_, data, err := ws.Read(ctx)
			if err != nil {
				return
			}
			text := string(data)
			t.later(func() { received(text) })
		}
	})

	return map[string]any{
		"close": cancel,
		"send": func(text string) {
			select {
			case out <- text:
			default:
				cancel()
			}
		},
	}
}

func (t *Tab) origin() string { return strings.TrimSuffix(t.b.cfg.Address, "/") }

// asked is an HTTP request.
type asked struct {
	method, url, body string
	headers           map[string]string
}

// answering has the callbacks of a request. answered gets the body, unless that is an event stream, whose parts go to
// received. failed is called when there is no answer, or when a stream has ended.
type answering struct {
	answered func(status int, headers map[string]string, body string)
	received func(text string)
	failed   func()
}

// call makes the request what for a script. on has the script's callbacks.
func (t *Tab) call(what, on *goja.Object) map[string]any {
	request := asked{
		method: what.Get("method").String(), url: what.Get("url").String(), body: what.Get("body").String(),
		headers: map[string]string{},
	}
	headers := what.Get("headers").ToObject(t.vm)
	for _, name := range headers.Keys() {
		request.headers[name] = headers.Get(name).String()
	}

	answered, failed := t.calling(on.Get("answered")), t.calling(on.Get("failed"))
	to := answering{
		answered: func(status int, headers map[string]string, body string) { answered(status, headers, body) },
		failed:   func() { failed() },
		received: func(string) {},
	}
	if receive := on.Get("received"); receive != nil {
		received := t.calling(receive)
		to.received = func(text string) { received(text) }
	}

	ctx, cancel := context.WithCancel(t.page)
	t.ask(ctx, request, to)

	return map[string]any{"cancel": cancel}
}

// ask makes a request. It calls none of the callbacks once ctx has ended.
func (t *Tab) ask(ctx context.Context, what asked, to answering) {
	later := func(f func()) {
		t.later(func() {
			if ctx.Err() == nil {
				f()
			}
		})
	}

	t.b.cfg.Asked(what.method, what.url)
	t.b.work.Go(func() {
		req, err := http.NewRequestWithContext(ctx, what.method, what.url, strings.NewReader(what.body))
		if err != nil {
			later(to.failed)
			return
		}
		for name, value := range what.headers {
			req.Header.Set(name, value)
		}
		req.Header.Set("Origin", t.origin())

		resp, err := t.b.web.Do(req)
		if err != nil {
			later(to.failed)
			return
		}
		defer resp.Body.Close()

		headers := map[string]string{}
		for name := range resp.Header {
			headers[name] = resp.Header.Get(name)
		}
		if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
			later(func() { to.answered(resp.StatusCode, headers, "") })
			t.listen(resp.Body, later, to)
			return
		}

		body, err := io.ReadAll(resp.Body)
		if err != nil {
			later(to.failed)
			return
		}
		later(func() { to.answered(resp.StatusCode, headers, string(body)) })
	})
}

// listen passes an event stream on to received.
func (t *Tab) listen(stream io.Reader, later func(func()), to answering) {
	buf := make([]byte, 4096)
	for {
		n, err := stream.Read(buf)
		if n > 0 {
			text := string(buf[:n])
			later(func() { to.received(text) })
		}
		if err != nil {
			later(to.failed)
			return
		}
	}
}
