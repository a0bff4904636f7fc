package browser

import (
	"context"
	"io"
	"net/http"
	"strings"

	"github.com/coder/websocket"
	"github.com/dop251/goja"
)

// socket is a WebSocket for a script, whose functions on has.
func (t *Tab) socket(address, protocol string, on *goja.Object) map[string]any {
	opened, heard, ended := t.calling(on.Get("opened")), t.calling(on.Get("heard")), t.calling(on.Get("ended"))
	ctx, cancel := context.WithCancel(t.page)
	out := make(chan string, 256) // frames; a script that is further ahead loses the connection

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
			t.later(func() { heard(text) })
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

// asked is a request.
type asked struct {
	method, url, body string
	headers           map[string]string
}

// answering takes what comes of a request: answered, with the body unless it is an event stream, which is heard in
// pieces; and failed, when there is no answer or a stream has ended.
type answering struct {
	answered func(status int, headers map[string]string, body string)
	heard    func(text string)
	failed   func()
}

// call makes a request for a script, whose functions on has.
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
		heard:    func(string) {},
	}
	if hear := on.Get("heard"); hear != nil {
		heard := t.calling(hear)
		to.heard = func(text string) { heard(text) }
	}

	ctx, cancel := context.WithCancel(t.page)
	t.ask(ctx, request, to)

	return map[string]any{"cancel": cancel}
}

// ask makes a request. Nobody hears of one whose ctx has ended.
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

// listen passes on an event stream.
func (t *Tab) listen(stream io.Reader, later func(func()), to answering) {
	buf := make([]byte, 4096)
	for {
		n, err := stream.Read(buf)
		if n > 0 {
			text := string(buf[:n])
			later(func() { to.heard(text) })
		}
		if err != nil {
			later(to.failed)
			return
		}
	}
}
