package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/presencemem"
)

// stubborn is a store that refuses to detach for some time.
type stubborn struct {
	*presencemem.Store
	mu      sync.Mutex
	refuses int
	broken  string // the page of a topic that cannot be detached
	largest int    // the largest batch of a Detach
}

func (s *stubborn) Detach(ctx context.Context, gateway string, topics []presence.Topic) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.largest = max(s.largest, len(topics))

	if slices.Contains(topics, presence.CountTopic(s.broken)) {
		return errors.New("foreign data")
	}
	if s.refuses > 0 {
		s.refuses--
		return errors.New("no answer")
	}

	return s.Store.Detach(ctx, gateway, topics)
}

// incarnations returns the gateways that have endpoints in s.
func incarnations(t *testing.T, s *presencemem.Store) (incarnations []string) {
	t.Helper()
	for b := range presence.DefaultBuckets {
		ends, err := s.Attached(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ends {
			if !slices.Contains(incarnations, e.Gateway) {
				incarnations = append(incarnations, e.Gateway)
			}
		}
	}

	slices.Sort(incarnations)

	return incarnations
}

// TestEndpointsEndWithTheLifeOfTheirGateway: endpoints of dead gateways are removed, also those older than the
// dispatcher, and even if the store refuses at first. Endpoints of a gateway that was away only for a moment stay.
func TestEndpointsEndWithTheLifeOfTheirGateway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stubborn{Store: presencemem.New(presencemem.Config{}), refuses: 2}

		var many []string
		for i := range (dropBatch + dropBatch/2) * presence.DefaultBuckets {
			many = append(many, fmt.Sprint("p", i))
		}

		attach(t, s.Store, "a:1/1", many...)
		attach(t, s.Store, "a:1/2", "p1")
		attach(t, s.Store, "b:1/1", "p1", "p2")
		attach(t, s.Store, "without a life", "p1")

		begun := time.Now()
		gateways := endings(func(incarnation string) bool {
			// Whenever the checks begin, at least one in every 3 s finds b:1/1 alive.
			early := time.Since(begun) < 6*time.Second
			off := time.Since(begun)%(3*time.Second) < 1900*time.Millisecond
			blink := early && off && incarnation == "b:1/1"

			return blink || incarnation == "a:1/1" || incarnation == "without a life"
		})

		d := New(Config{Store: s, Gateways: gateways, Log: zerolog.Nop()})
		d.Own(upTo(presence.DefaultBuckets))

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = d.Run(ctx)
		}()
		defer func() {
			stop()
			<-done
		}()

		left := func() {
			t.Helper()

			time.Sleep(10 * time.Second)
			synctest.Wait()
			if got := incarnations(t, s.Store); !slices.Equal(got, []string{"a:1/2", "b:1/1"}) {
				t.Fatalf("endpoints of %q are left, want those of a:1/2 and b:1/1", got)
			}
		}

		left()
		if s.largest > dropBatch {
			t.Fatalf("the largest batch has %d topics", s.largest)
		}

		attach(t, s.Store, "a:1/1", "late") // an Attach of before arrives only now
		left()
	})
}

// TestABrokenBucketKeepsNoEndpointsOfOthers: a broken bucket does not keep the endpoints of dead gateways in other
// buckets from being removed.
func TestABrokenBucketKeepsNoEndpointsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stubborn{Store: presencemem.New(presencemem.Config{}), broken: "p0"}

		var pages []string
		for i := range 10 * presence.DefaultBuckets {
			pages = append(pages, fmt.Sprint("p", i))
		}

		attach(t, s.Store, "a:1/1", pages...)

		d := New(Config{Store: s, Gateways: endings(func(string) bool { return true }), Log: zerolog.Nop()})
		d.Own(upTo(presence.DefaultBuckets))

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = d.Run(ctx)
		}()
		defer func() {
			stop()
			<-done
		}()

		time.Sleep(10 * time.Second)
		for b := range presence.DefaultBuckets {
			ends, err := s.Attached(t.Context(), b)
			broken := b == presence.Bucket("p0", presence.DefaultBuckets)
			if err != nil || (len(ends) > 0) != broken {
				t.Errorf("bucket %d has %d endpoints, %v; it is broken: %t", b, len(ends), err, broken)
			}
		}
	})
}

// endings is a function that implements Gateways and accepts every push.
type endings func(incarnation string) (ended bool)

func (endings) PushUpdates(context.Context, string, []presence.Update) error {
	return nil
}

func (ended endings) Ended(incarnation string) bool { return ended(incarnation) }
