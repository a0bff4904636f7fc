package link_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	calls "headcount/counter/call"
	"headcount/counter/link"
	"headcount/counter/owner"
	"headcount/internal/rows/rowsmem"
)

// to has one process own all partitions.
type to struct{ peer *link.Peer }

func (t to) OwnerOf(int) calls.Owner { return t.peer }

// TestALateCallIsNotMade: a link to the owner stalls. It delivers calls when their callers have given up, and another
// process has been answered. The answered change stands.
func TestALateCallIsNotMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := rowsmem.New(rowsmem.Config{})
		o := owner.New(store, owner.Config{Name: "b", VerifyEvery: -1, SweepEvery: -1})
		defer o.Close()
		const partition = owner.ExactPartition
		if err := o.Own(t.Context(), partition); err != nil {
			t.Fatal(err)
		}

		exact := &counter.Rule{Kind: counter.Exact}
		stalled := &stalled{flow: make(chan struct{})}
		w := start(t, &ownerFunc{do: o.Do}, []byte("key"))
		stalled.server = w.server
		far := link.NewClient(stalled.dial, time.Now)
		set := func(client *link.Client, stream string, value int64, patience time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			change := counter.Change{Key: "stock", Rule: exact, Verb: counter.Set, Delta: value, Reason: "r", By: "bob"}
			ops := []counter.Op{{Changes: []counter.Change{change}}}
			caller := calls.New(to{client.To("b")}, calls.Config{Stream: stream})
			answer, err := caller.Do(ctx, owner.Call{Partition: partition, Ops: ops})
			if err != nil {
				return err
			}

			return answer.Results[0].Err
		}

		if err := set(far, "far", 3, 5*time.Second); !errors.Is(err, counter.ErrUnavailable) {
			t.Fatalf("the call over the stalled link returned %v, want ErrUnavailable", err)
		}
		if err := set(w.client, "near", 5, time.Second); err != nil {
			t.Fatal(err)
		}

		close(stalled.flow)
		synctest.Wait() // the late calls have arrived
		if !stalled.delivered() {
			t.Fatal("the late calls have not arrived")
		}
		read, err := owner.NewReader(store, func(string) int { return partition }).Read(t.Context(), []string{"stock"},
			"", 0)
		if err != nil || read[0].Value != 5 {
			t.Errorf("the counter is %+v, %v; want the answered 5", read, err)
		}

		// From now on the link works again.
		if err := set(far, "far again", 7, time.Second); err != nil {
			t.Error(err)
		}
		far.Close()
		stalled.wg.Wait()
	})
}

// TestUntilIsOfTheClusterAlone: how long a call may take does not depend on the wall clocks of its two processes. A
// process that does not know the time of the cluster yet refuses no call.
func TestUntilIsOfTheClusterAlone(t *testing.T) {
	ahead := func() time.Time { return time.Now().Add(time.Hour) } // ahead of the clock of the machine
	unknown := func() time.Time { return time.Time{} }

	for name, tc := range map[string]struct {
		client, server link.Clock
		want           time.Duration // the time left at the owner; 0: no limit
	}{
		"the same":                 {ahead, ahead, time.Minute},
		"the client does not know": {unknown, ahead, 0},
		"the server does not know": {ahead, unknown, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := make(chan time.Duration, 1)
				o := &ownerFunc{do: func(_ context.Context, call owner.Call) (owner.Answer, error) {
					left := time.Duration(0)
					if !call.Until.IsZero() {
						left = time.Until(call.Until)
					}
					got <- left

					return valueOf(call), nil
				}}

				server := link.NewServer(o, tc.server)
				defer server.Close()
				mine, theirs := net.Pipe()
				go server.Serve(theirs, nil)
				client := link.NewClient(func(context.Context, string) (io.ReadWriteCloser, []byte, error) {
					return mine, nil, nil
				}, tc.client)
				defer client.Close()

				limited := call(1, 1)
				limited.Until = time.Now().Add(time.Minute)
				if _, err := client.To("b").Do(t.Context(), limited); err != nil {
					t.Fatal(err)
				}
				if left := <-got; left != tc.want {
					t.Errorf("%v is left, want %v", left, tc.want)
				}
			})
		})
	}
}

// stalled has links to a server that hold back everything that is sent, until flow is closed.
type stalled struct {
	server *link.Server
	flow   chan struct{}
	wg     sync.WaitGroup

	mu   sync.Mutex // guards sent
	sent int        // bytes that came through
}

func (s *stalled) delivered() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.sent > 0
}

func (s *stalled) dial(context.Context, string) (io.ReadWriteCloser, []byte, error) {
	mine, near := net.Pipe()
	far, theirs := net.Pipe()
	s.wg.Go(func() { s.server.Serve(theirs, []byte("key")) })
	s.wg.Go(func() { _, _ = io.Copy(near, far) })
	s.wg.Go(func() {
		defer far.Close()
		s.pass(far, near)
	})

	return mine, []byte("key"), nil
}

// pass passes on what comes. What was sent before the link flows is delivered even if its sender has closed the link.
func (s *stalled) pass(far, near net.Conn) {
	var kept bytes.Buffer
	read := make(chan struct{})
	s.wg.Go(func() {
		defer close(read)
		_, _ = io.Copy(&kept, near)
	})

	select {
	case <-read: // the sender has closed the link
		<-s.flow
	case <-s.flow:
		_ = near.SetReadDeadline(time.Now())
		<-read
		_ = near.SetReadDeadline(time.Time{})
	}

	n, _ := far.Write(kept.Bytes())
	s.mu.Lock()
	s.sent += n
	s.mu.Unlock()
	_, _ = io.Copy(far, near)
}
