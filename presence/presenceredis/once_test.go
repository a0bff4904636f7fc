package presenceredis_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/presence"
	"headcount/unread"
)

// A change of a page is counted once, even if the connection breaks before the answer. Each change has a page of its
// own. The tests of counters cover the other commands.
func TestServerAChangeCountsOnceWhenAnswersAreCutOff(t *testing.T) {
	t.Parallel()
	const cuts = 100
	url, left := redistest.StartCluster(t, 3, 0).Cut(t, cuts)
	s := open(t, url)
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	var wg sync.WaitGroup
	for client := range 4 {
		wg.Go(func() {
			for n := 0; left.Left() > 0; n++ {
				page := fmt.Sprint("page ", client, " ", n)
				err := s.Change(t.Context(), page, unread.Change{})
				if err != nil && !errors.Is(err, presence.ErrUnavailable) {
					t.Error(err)
				}

				if err != nil {
					time.Sleep(time.Millisecond) // after a failure the store may refuse calls for half a second
				}
				mu.Lock()
				acknowledged[page] = err == nil
				mu.Unlock()
			}
		})
	}

	wg.Wait()

	// A change without an acknowledgement may have been made, but never twice.
	read := open(t, url)
	unknown := 0
	for page, ok := range acknowledged {
		levels, _, err := read.Levels(t.Context(), unread.User{}, []string{page})
		if err != nil {
			t.Fatal(err)
		}

		if n := levels[0].All; n > 1 || ok && n != 1 {
			t.Errorf("%s has %d changes, though one was made and acknowledged: %v", page, n, ok)
		}
		if !ok {
			unknown++
		}
	}

	t.Logf("%d changes, %d not acknowledged", len(acknowledged), unknown)
}
