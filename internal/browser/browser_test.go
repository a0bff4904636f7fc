package browser

import (
	"context"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// pipes is a listener whose connections are in memory.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, ok := <-p; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error {
	close(p)
	return nil
}

func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

// world has a browser whose tabs report what they do.
type world struct {
	*Browser
	said []string // used in the loop, or at rest
}

func newWorld(t *testing.T) *world {
	server := pipes(make(chan net.Conn))
	srv := &http.Server{Handler: http.NotFoundHandler()}
	go func() { _ = srv.Serve(server) }()

	w := &world{}
	w.Browser = New(Config{
		Address: "http://site.test/", Chance: rand.New(rand.NewPCG(1, 2)),
		Files: fstest.MapFS{
			"module.js":   {Data: []byte("const own = import.meta.url;export{own as address};")},
			"function.js": {Data: []byte("export default async function one(){return two()}function two(){return 2}")},
		},
		Dial: func(context.Context, string, string) (net.Conn, error) {
			here, there := net.Pipe()
			server <- there
			return here, nil
		},
		Asked: func(string, string) {},
		Say:   func(text string) { w.said = append(w.said, text) },
		Fail:  func(text string) { t.Error(text) },
	})

	t.Cleanup(func() {
		w.Close()
		_ = srv.Close()
	})

	return w
}

// open opens a tab whose script may report something.
func (w *world) open(name, script string) (tab *Tab) {
	say := map[string]any{"say": func(text string) { w.said = append(w.said, name+": "+text) }}
	w.Do(func() { tab = w.Open(say, script) })
	synctest.Wait()

	return tab
}

func (w *world) wants(t *testing.T, said ...string) {
	t.Helper()
	synctest.Wait()
	if !slices.Equal(w.said, said) {
		t.Errorf("they said %q; want %q", w.said, said)
	}
	w.said = nil
}

func TestModulesAndTimers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.open("a", `
			const { address } = await load('./module.js?1');
			say(address);
			say('' + await (await load('./function.js')).default());
			const each = setInterval((what) => say(what), 1000, 'a second');
			setTimeout(() => clearInterval(each), 2500);
		`)
		time.Sleep(time.Hour)
		w.wants(t, "a: http://site.test/-/module.js", "a: 2", "a: a second", "a: a second")
	})
}

// A frozen tab keeps its lock until another tab steals it, and receives everything when it thaws.
func TestTabsShareLocksAndChannels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		const script = `
			const channel = new BroadcastChannel('all');
			channel.onmessage = ({ data }) => say('hears ' + data.word);
			globalThis.take = (steal) => navigator.locks.request('one', { steal }, () => new Promise(() => {
				say('has the lock');
				channel.postMessage({ word: 'mine' });
			})).catch(({ name }) => say('lost it: ' + name));
			take(false);
		`
		a := w.open("a", script)
		b := w.open("b", script)
		w.wants(t, "a: has the lock")

		w.Do(func() { a.Freeze() })
		w.Do(func() { b.Run("take(true)") })
		w.wants(t, "b: has the lock")
		w.Do(func() { a.Thaw() })
		w.wants(t, "a: lost it: AbortError", "a: hears mine")

		// The requests of a killed tab end with it.
		w.Do(func() { b.Kill() })
		c := w.open("c", script)
		w.wants(t, "c: has the lock", "a: hears mine")
		w.Do(func() { c.Leave() })
		w.wants(t)
	})
}

func TestStorageOutlivesATab(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		a := w.open("a", `say(typeof localStorage.key); localStorage.key = 1;`)
		w.Do(func() { a.Kill() })
		w.open("b", `say(localStorage.key + ' ' + typeof localStorage.key);`)
		w.wants(t, "a: undefined", "b: 1 string")
	})
}
