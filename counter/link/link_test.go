package link_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/link"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// sum and stock have everything that an owner needs of a rule.
var (
	sum = &counter.Rule{
		Kind: counter.Sum, Ledger: counter.DefaultLedger, Dimensions: []string{"country", "os"},
		Resolutions: []counter.Resolution{
			{Step: time.Second, Kept: time.Hour}, {Step: time.Minute, Kept: 24 * time.Hour},
		},
	}
	stock = &counter.Rule{Kind: counter.Exact, Floor: number(0), Ceiling: number(-1 << 60)}
)

func number(n int64) *int64 { return &n }

// ownerFunc makes calls by a function, and remembers what it was asked to release.
type ownerFunc struct {
	do         func(ctx context.Context, call owner.Call) (owner.Answer, error)
	released   []int
	releasedTo string
}

func (o *ownerFunc) Do(ctx context.Context, call owner.Call) (owner.Answer, error) {
	return o.do(ctx, call)
}

func (o *ownerFunc) Probe(_ context.Context, name string) bool { return name == "c" }

func (o *ownerFunc) Release(_ context.Context, to string, partitions []int) error {
	o.releasedTo = to
	o.released = append(o.released, partitions...)

	return nil
}

// world is a client and a server. Each connection is a pipe.
type world struct {
	client *link.Client
	server *link.Server

	mu    sync.Mutex
	pipes []net.Conn // the server's ends
	wg    sync.WaitGroup
}

func start(t *testing.T, o link.Process, key []byte) *world {
	t.Helper()
	w := &world{server: link.NewServer(o, time.Now)}
	w.client = link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
		mine, theirs := net.Pipe()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.pipes = append(w.pipes, theirs)
		w.wg.Go(func() { w.server.Serve(theirs, key) })

		return mine, key, nil
	}, time.Now)
	t.Cleanup(func() {
		w.client.Close()
		w.server.Close()
		w.wg.Wait()
	})

	return w
}

func (w *world) connections() int {
	w.mu.Lock()
	defer w.mu.Unlock()

	return len(w.pipes)
}

func call(partition int, number uint64) owner.Call {
	key := fmt.Sprintf("k%d", number)
	change := counter.Change{Key: key, Rule: sum, Verb: counter.Add, Delta: int64(number)}

	return owner.Call{
		Partition: partition, Stream: "s", Number: number, Ops: []counter.Op{{Changes: []counter.Change{change}}},
	}
}

// valueOf answers a call with a counter that has the delta as its value.
func valueOf(call owner.Call) owner.Answer {
	change := call.Ops[0].Changes[0]
	result := counter.Result{Counters: []counter.Counter{{Key: change.Key, Kind: counter.Sum, Value: change.Delta}}}

	return owner.Answer{Results: []counter.Result{result}}
}

// TestCallsComeBack: a call reaches the owner as it was sent, and so does its answer the caller.
func TestCallsComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []owner.Call
		o := &ownerFunc{do: func(_ context.Context, call owner.Call) (owner.Answer, error) {
			got = append(got, call)
			return valueOf(call), nil
		}}

		w := start(t, o, []byte("key"))

		sent := call(7, 3)
		sent.Repeated = true
		sent.Ops[0].IdempotencyKey = counter.IdempotencyKey{1, 2, 3}
		sent.Ops[0].Changes[0].Reason = "because"
		sent.Ops[0].Changes[0].Dimensions = []counter.Dimension{{Name: "country", Value: "de"}}
		member := counter.Change{
			Key: "m", Rule: sum, Verb: counter.Edit, Join: []string{"a", "b"}, Leave: []string{"c"},
		}
		bounded := counter.Change{Key: "s", Rule: stock, Verb: counter.Add, Delta: -1}
		sent.Ops = append(sent.Ops, counter.Op{Changes: []counter.Change{member}},
			counter.Op{Changes: []counter.Change{bounded}})
		sent.More = &owner.More{}
		sent.More.Limits = []limit.Request{
			{Name: limit.Name{Key: "l", Algorithm: limit.Log, Window: 1000}, Limit: 5, Cost: 2},
		}
		sent.More.Rows = []owner.Expiring{
			{Row: rows.Row{Name: rows.Name{Collection: "c", Field: "f"}, Value: []byte{}}, Until: time.UnixMilli(1234)},
			{Row: rows.Row{Name: rows.Name{Collection: "c", Field: "g"}}},
		}

		sent.More.Asked = []counter.IdempotencyKey{{7}}
		sent.More.Remembered = []counter.IdempotencyKey{{8}, {9}}

		o.do = func(_ context.Context, call owner.Call) (owner.Answer, error) {
			got = append(got, call)
			edited := counter.Result{Counters: []counter.Counter{{Key: "m", Value: 2}}}
			more := &owner.MoreAnswer{Limits: []limit.Answer{{Allowed: true, Remaining: 3}}, Known: []bool{true}}
			return owner.Answer{
				Results: append(valueOf(call).Results, edited, counter.Result{Counters: []counter.Counter{{Key: "s"}}}),
				More:    more,
			}, nil
		}

		answer, err := w.client.To("b").Do(t.Context(), sent)
		if err != nil {
			t.Fatal(err)
		}

		want := &owner.MoreAnswer{Limits: []limit.Answer{{Allowed: true, Remaining: 3}}, Known: []bool{true}}
		if len(got) != 1 || !reflect.DeepEqual(got[0], sent) {
			t.Errorf("sent\n%+v\ngot\n%+v", sent, got)
		}
		if len(answer.Results) != 3 || answer.Results[0].Counters[0].Value != 3 ||
			!reflect.DeepEqual(answer.More, want) {
			t.Errorf("the answer is %+v", answer)
		}
	})
}

// Many calls share a connection, and a slow one does not delay the others.
func TestCallsShareAConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &ownerFunc{do: func(_ context.Context, call owner.Call) (owner.Answer, error) {
			time.Sleep(time.Duration(100-call.Number) * time.Millisecond)
			return valueOf(call), nil
		}}

		w := start(t, o, nil)

		begin := time.Now()
		var wg sync.WaitGroup
		for i := range uint64(rows.Partitions) {
			wg.Go(func() {
				answer, err := w.client.To("b").Do(t.Context(), call(int(i), i+1))
				if err != nil || answer.Results[0].Counters[0].Value != int64(i+1) {
					t.Errorf("call %d: %+v, %v", i, answer, err)
				}
			})
		}

		wg.Wait()

		if took := time.Since(begin); took > 100*time.Millisecond {
			t.Errorf("all calls together took %v, want 100ms at most", took)
		}
		if w.connections() != 1 {
			t.Errorf("%d connections, want 1", w.connections())
		}
	})
}

// TestErrorsComeBack: a caller gets the kind of error that the owner returned.
func TestErrorsComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &ownerFunc{}
		w := start(t, o, nil)
		for _, want := range []error{owner.ErrNotOwner, owner.ErrOld, counter.ErrBusy, counter.ErrUnavailable} {
			o.do = func(context.Context, owner.Call) (owner.Answer, error) {
				return owner.Answer{}, fmt.Errorf("here: %w", want)
			}
			if _, err := w.client.To("b").Do(t.Context(), call(0, 1)); !errors.Is(err, want) {
				t.Errorf("%v came back as %v", want, err)
			}
		}

		o.do = func(context.Context, owner.Call) (owner.Answer, error) {
			return owner.Answer{}, fmt.Errorf("here: %w", &link.Moved{To: "c"})
		}
		var moved *link.Moved
		if _, err := w.client.To("b").Do(t.Context(), call(0, 1)); !errors.As(err, &moved) || moved.To != "c" ||
			!errors.Is(err, owner.ErrNotOwner) {
			t.Errorf("a moved partition came back as %v", err)
		}

		err := w.client.To("b").Release(t.Context(), "a", []int{3, 63})
		if err != nil || !slices.Equal(o.released, []int{3, 63}) || o.releasedTo != "a" {
			t.Errorf("released %v to %q: %v", o.released, o.releasedTo, err)
		}

		for _, name := range []string{"c", "d"} {
			if reached, err := w.client.To("b").Probe(t.Context(), name); err != nil || reached != (name == "c") {
				t.Errorf("%s is reached: %v, %v", name, reached, err)
			}
		}
	})
}

// A process that refuses links is reachable: other processes may not take its partitions.
func TestAProcessWithoutLinksIsReachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
			return nil, nil, fmt.Errorf("answered 404: %w", link.ErrRefused)
		}, time.Now)
		defer refused.Close()
		if err := refused.To("b").Ping(t.Context()); err == nil || errors.Is(err, link.ErrUnreachable) {
			t.Errorf("a ping over a refused link returns %v, want an error other than ErrUnreachable", err)
		}

		away := link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
			return nil, nil, syscall.ECONNREFUSED
		}, time.Now)
		defer away.Close()
		if err := away.To("b").Ping(t.Context()); !errors.Is(err, link.ErrUnreachable) {
			t.Errorf("a ping over a refused connection returns %v, want ErrUnreachable", err)
		}
	})
}

// While an owner's store does not answer, its calls wait, and the connection stays, because the process answers pings.
func TestAWaitingOwnerKeepsItsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := &ownerFunc{do: func(ctx context.Context, _ owner.Call) (owner.Answer, error) {
			<-ctx.Done()
			return owner.Answer{}, counter.ErrUnavailable
		}}

		w := start(t, o, []byte("key"))
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := w.client.To("b").Do(ctx, call(0, 1)); !errors.Is(err, counter.ErrUnavailable) {
				t.Errorf("the call ended with %v", err)
			}

			cancel()
		}

		if w.connections() != 1 {
			t.Errorf("%d connections", w.connections())
		}
	})
}

// The first call that a silent process does not answer shows that it has gone, and the connection is given up.
func TestASilentConnectionIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dialled := 0
		client := link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
			dialled++
			mine, theirs := net.Pipe()
			go func() { _, _ = io.Copy(io.Discard, theirs) }()

			return mine, nil, nil
		}, time.Now)

		defer client.Close()

		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := client.To("b").Do(ctx, call(0, 1)); !errors.Is(err, counter.ErrUnavailable) {
				t.Errorf("the call ended with %v", err)
			}

			cancel()
			synctest.Wait()
		}

		if dialled != 2 {
			t.Errorf("%d connections", dialled)
		}
	})
}

// A call fails when its connection breaks, and the next one makes a new connection.
func TestABrokenConnectionIsMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := make(chan struct{})
		o := &ownerFunc{do: func(ctx context.Context, _ owner.Call) (owner.Answer, error) {
			close(begun)
			<-ctx.Done()
			return owner.Answer{}, ctx.Err()
		}}

		w := start(t, o, nil)
		failed := make(chan error)
		go func() {
			_, err := w.client.To("b").Do(t.Context(), call(0, 1))
			failed <- err
		}()

		<-begun
		_ = w.pipes[0].Close()
		if err := <-failed; !errors.Is(err, counter.ErrUnavailable) {
			t.Errorf("the call ended with %v", err)
		}

		o.do = func(_ context.Context, call owner.Call) (owner.Answer, error) { return valueOf(call), nil }
		if _, err := w.client.To("b").Do(t.Context(), call(0, 2)); err != nil {
			t.Error(err)
		}
	})
}

// A frame that was not signed with the key, or not as this frame of this connection, is not carried out.
func TestForgedFramesEndTheConnection(t *testing.T) {
	good := record(t, []byte("key"))
	for name, frames := range map[string][]byte{
		"no key":       record(t, nil),
		"another key":  record(t, []byte("other")),
		"a bit":        flip(good, len(good)-20),
		"twice":        append(slices.Clone(good), good...),
		"a long one":   append([]byte{0xff, 0xff, 0xff, 0xff}, good[4:]...),
		"a short one":  binary.BigEndian.AppendUint32(nil, 3),
		"an empty one": append(binary.BigEndian.AppendUint32(nil, 16), make([]byte, 16)...),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				calls := 0
				o := &ownerFunc{do: func(_ context.Context, call owner.Call) (owner.Answer, error) {
					calls++
					return valueOf(call), nil
				}}

				server := link.NewServer(o, time.Now)
				defer server.Close()

				mine, theirs := net.Pipe()
				var wg sync.WaitGroup
				defer wg.Wait()
				wg.Go(func() {
					_, _ = mine.Write(frames)
					time.Sleep(time.Second) // until all of them were carried out, if any
					_ = mine.Close()
				})

				wg.Go(func() { _, _ = io.Copy(io.Discard, mine) })
				server.Serve(theirs, []byte("key"))

				if most := map[bool]int{true: 1}[name == "twice"]; calls > most {
					t.Errorf("%d calls were made, want %d at most", calls, most)
				}
			})
		})
	}
}

// record returns the frame of a call as a client signs it with a key.
func record(t *testing.T, key []byte) []byte {
	t.Helper()
	var frame []byte
	synctest.Test(t, func(t *testing.T) {
		recorded := make(chan []byte, 1)
		client := link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
			mine, theirs := net.Pipe()
			go func() {
				b := make([]byte, 1<<16)
				n, _ := io.ReadAtLeast(theirs, b, 4)
				recorded <- b[:n:n]
				_ = theirs.Close()
			}()

			return mine, key, nil
		}, time.Now)

		defer client.Close()
		_, _ = client.To("b").Do(t.Context(), call(1, 1))
		frame = <-recorded
		// Only the call is needed, not the ping that follows it.
		frame = frame[:4+binary.BigEndian.Uint32(frame)]
	})

	return frame
}

func flip(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at] ^= 1

	return b
}

// An owner refuses a change that has no rule, and does not make it.
func TestAChangeWithoutARule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, &ownerFunc{do: func(context.Context, owner.Call) (owner.Answer, error) {
			t.Error("the call was made")
			return owner.Answer{}, nil
		}}, nil)
		without := call(0, 1)
		without.Ops[0].Changes[0].Rule = nil

		if _, err := w.client.To("b").Do(t.Context(), without); !errors.Is(err, counter.ErrOp) {
			t.Errorf("the call ended with %v", err)
		}
	})
}

func FuzzCall(f *testing.F) {
	one := call(3, 9)
	one.Until = time.UnixMilli(1234)
	f.Add(owner.AppendCall(nil, &one))
	f.Fuzz(func(t *testing.T, b []byte) {
		parsed, err := owner.ParseCall(b, &owner.Rules{})
		if err != nil {
			return
		}
		again, err := owner.ParseCall(owner.AppendCall(nil, parsed), &owner.Rules{})
		if err != nil || !reflect.DeepEqual(again, parsed) {
			t.Errorf("%+v came back as %+v: %v", parsed, again, err)
		}
	})
}
