package counterapi

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/gateway/bounds"
)

// takes is how long the slow store needs for a history.
const takes = 400 * time.Millisecond

// slow is a store that is slow.
type slow struct {
	Counters
	histories atomic.Int32
	stale     bool // as while a region is silent
}

func (s *slow) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	s.histories.Add(1)

	is, gains, err := s.Counters.History(ctx, key, step, from, to)
	time.Sleep(takes)
	is.Stale = s.stale
	return is, gains, err
}

// slowly serves a slow store, by a clock of its own.
func slowly(t *testing.T, test func(t *testing.T, s *served, store *slow)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := &slow{}
		s := serve(t, func(cfg *Config) {
			store.Counters = cfg.Counters
			cfg.Counters = store
		})

		test(t, s, store)
	})
}

func text(w *httptest.ResponseRecorder) string { return strings.TrimSpace(w.Body.String()) }

// atOnce makes the calls at the same time, from as few addresses as may make them.
func (s *served) atOnce(calls []string) []*httptest.ResponseRecorder {
	s.t.Helper()
	out := make([]*httptest.ResponseRecorder, len(calls))

	var wg sync.WaitGroup
	for i, call := range calls {
		wg.Go(func() { out[i] = s.do(call, "", from(i/bounds.QuestionsOfAddress.Max)) })
	}
	wg.Wait()

	return out
}

// from returns the header line of a call from the n-th address.
func from(n int) string { return fmt.Sprint("Addr: 2001:db8:0:", n, "::1") }

// TestEqualQuestions: equal questions share one computation. Its answer is kept for the time that the rule permits,
// counted from the start of the computation.
func TestEqualQuestions(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, store *slow) {
		s.want("POST /hits:1/increment", `{"delta":5}`, 200, one("hits:1", "sum", 5, "1"))

		calls := make([]string, 64)
		for i := range calls {
			calls[i] = "GET /hits:1/window?last=24h"
			if i%2 == 1 {
				calls[i] = "GET /hits:1/window?last=1d"
			}
		}

		began := time.Now()
		for i, w := range s.atOnce(calls) {
			want := `{"key":"hits:1","last":"24h","value":5}`
			if i%2 == 1 {
				want = `{"key":"hits:1","last":"1d","value":5}`
			}
			if w.Code != 200 || text(w) != want {
				t.Fatalf("the answer is %d %s, want %s", w.Code, w.Body, want)
			}
		}

		if n := store.histories.Load(); n != 1 || time.Since(began) != takes {
			t.Errorf("%d computations in %s, want 1 that takes %s", n, time.Since(began), takes)
		}

		s.want("POST /hits:1/increment", "", 200, one("hits:1", "sum", 6, "2"))
		for _, when := range []struct {
			after time.Duration
			value int
		}{{5*time.Second - takes - time.Nanosecond, 5}, {time.Nanosecond, 6}} {
			time.Sleep(when.after)
			if w := s.do(calls[0], ""); text(w) != fmt.Sprintf(`{"key":"hits:1","last":"24h","value":%d}`, when.value) {
				t.Errorf("%s after the first question: %s, want %d", time.Since(began), w.Body, when.value)
			}
		}

		s.want("POST /hits:1/increment", "", 200, one("hits:1", "sum", 7, "3"))
		s.want("GET /hits:1/window?last=24h", "", 200,
			`{"key":"hits:1","last":"24h","value":7}`) // a server sees its own change
	})
}

// Long answers are written one after the other, even if all wait for one computation.
func TestLongAnswersTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers, points = 64, 1000
		s := NewQuestions[question, outcome](maxAnswers)
		q := question{of: "likes:1"}

		long := func(context.Context) (outcome, error) {
			time.Sleep(takes)
			return outcome{all: counter.Answer{Values: make([]int64, points)}}, nil
		}

		var mu sync.Mutex
		at := map[time.Duration]int{}
		start := time.Now()
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				_, err := s.Ask(t.Context(), q, time.Hour, Asker{}, long)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				}
				at[time.Since(start)]++
			})
		}
		wg.Wait()

		// The first is written as soon as it is computed, and each further one after the time that its predecessor
		// takes.
		if last := takes + (callers-1)*points*perPoint; len(at) != callers || at[takes] != 1 || at[last] != 1 {
			t.Errorf("answers at %v, want one each %s up to %s", at, points*perPoint, last)
		}

		if _, err := s.Ask(t.Context(), q, time.Hour, Asker{Server: true}, long); err != nil ||
			time.Since(start) < takes {
			t.Errorf("a server with an API key got %v after %s, want its answer after %s",
				err, time.Since(start), takes)
		}
		time.Sleep(time.Second) // until the pause after a question is over
	})
}

// An address that keeps asking for long answers does not delay those of others.
func TestLongAnswersOfOneAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const points = 1500
		s := NewQuestions[question, outcome](maxAnswers)

		ask := func(addr string) error {
			by := Asker{Addr: netip.MustParseAddr(addr)}
			_, err := s.Ask(t.Context(), question{of: "likes:1"}, time.Hour, by,
				func(context.Context) (outcome, error) {
					return outcome{all: counter.Answer{Values: make([]int64, points)}}, nil
				})
			return err
		}

		if err := ask("2001:db8::1"); err != nil {
			t.Fatal(err)
		}

		var refused atomic.Int32
		var wg sync.WaitGroup
		for i := range 2000 {
			wg.Go(func() {
				if errors.Is(ask(fmt.Sprintf("2001:db8::%x", i)), ErrTurn) {
					refused.Add(1)
				}
			})
		}

		// All questions of the first address are queued or refused by now, which is the worst moment for another
		// address to come.
		synctest.Wait()
		at := time.Now()
		waiting := time.Duration(bounds.AnswersOfAddress.Max + 1)
		if err := ask("2001:db8:1::1"); err != nil || time.Since(at) > waiting*points*perPoint {
			t.Errorf("another address got its answer (%v) only after %s", err, time.Since(at))
		}

		wg.Wait()
		if refused.Load() == 0 {
			t.Error("no question of the first address was refused")
		}
		time.Sleep(time.Second) // until the pause after a question is over
	})
}

// TestStaleAnswers: an answer that lacks a region is kept for a second only.
func TestStaleAnswers(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, store *slow) {
		store.stale = true
		for _, when := range []struct {
			after time.Duration
			want  string
		}{{0, `,"stale":true`}, {time.Second - takes - time.Nanosecond, `,"stale":true`}, {time.Nanosecond, ""}} {
			time.Sleep(when.after)
			w := s.do("GET /hits:1/window?last=1h", "")
			if text(w) != `{"key":"hits:1","last":"1h","value":0`+when.want+`}` {
				t.Errorf("the answer is %d %s, want it with %q", w.Code, w.Body, when.want)
			}

			store.stale = false
		}
	})
}

// TestFreshQuestions: with stale 0 in its rule, an answer has everything that was acknowledged before the question.
// Questions that wait meanwhile share the next computation.
func TestFreshQuestions(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, store *slow) {
		var wg sync.WaitGroup
		asking := func(want int) {
			wg.Go(func() {
				w := s.do("GET /fresh:1/window?last=24h", "")
				if text(w) != fmt.Sprintf(`{"key":"fresh:1","last":"24h","value":%d}`, want) {
					t.Errorf("the answer is %d %s, want the value %d", w.Code, w.Body, want)
				}
			})
		}

		asking(0)
		// The first computation has read the store already, and answers only later.
		time.Sleep(takes / 2)
		s.want("POST /fresh:1/increment", "", 200, one("fresh:1", "sum", 1, "1"))
		time.Sleep(takes/2 - time.Nanosecond)

		// These questions come during the first computation, whose answer may lack the change.
		for range 10 {
			asking(1)
		}

		time.Sleep(time.Nanosecond)
		synctest.Wait()
		wg.Wait()
		if n := store.histories.Load(); n > 2 {
			t.Errorf("%d computations, want 2", n)
		}
	})
}

// TestCountersThatDoNotExist: a question about a missing counter reads next to nothing, however long the time is.
func TestCountersThatDoNotExist(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, store *slow) {
		store.stale = true
		for n, want := range []string{
			`{"key":"people:0","last":"90d","value":0,"stale":true}`, `{"key":"people:1","last":"90d","value":0}`,
		} {
			w := s.do(fmt.Sprintf("GET /people:%d/window?last=90d", n), "")
			if reads := store.histories.Load(); w.Code != 200 || text(w) != want || reads != int32(n)+1 {
				t.Errorf("%d %s after %d reads, want %s after %d", w.Code, w.Body, reads, want, n+1)
			}

			store.stale = false
		}

		s.want("GET /people:2/range?from=1999-12-20T00:00:00Z&to=1999-12-20T02:00:00Z", "", 200,
			`{"key":"people:2","step":"1h","points":[{"value":0},{"value":0}],"total":0}`)
	})
}

// TestManyQuestions: different public questions are answered one at a time. Some wait a little, and the others get 429.
// Servers and ordinary calls are not affected, and later everything is as before.
func TestManyQuestions(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, store *slow) {
		var calls []string
		for i := range 100 {
			calls = append(calls, fmt.Sprintf("GET /hits:1/window?last=%dh", 30+i))
		}

		began := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			counts := map[int]int{}
			for _, w := range s.atOnce(calls) {
				counts[w.Code]++
				if w.Code != 200 {
					wantProblem(t, w, 429, "ask again later")
				}
			}

			// A pause of three times a computation would be longer.
			if counts[200] != 5 || counts[429] != 95 || time.Since(began) != 5*takes+4*maxPause {
				t.Errorf("the statuses are %v after %s", counts, time.Since(began))
			}
		})

		// The first question is being computed, so what follows comes while the public questions use all that they may.
		synctest.Wait()
		if n := store.histories.Load(); n != 1 {
			t.Errorf("%d computations are under way, want 1", n)
		}

		s.want("POST /votes:1/increment", "", 200, one("votes:1", "sum", 1, "1"))
		s.want("GET /votes:1", "", 200, one("votes:1", "sum", 1, "1"))
		if time.Since(began) != 0 {
			t.Errorf("ordinary calls took %s, want no time", time.Since(began))
		}

		s.want("GET /hits:1/window?last=2d", "", 200, `{"key":"hits:1","last":"2d","value":0}`)
		if time.Since(began) != takes {
			t.Errorf("a server waited for the public: %s", time.Since(began))
		}

		wg.Wait()
		if w := s.do("GET /hits:1/range?step=1h", ""); w.Code != 200 || time.Since(began) != 6*takes+5*maxPause {
			t.Errorf("after the pause a question is answered %d after %s", w.Code, time.Since(began))
		}
	})
}

// TestQuestionsOfOneAddress: an address that keeps asking different questions does not delay the questions of others,
// nor one of them that it has just asked.
func TestQuestionsOfOneAddress(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, _ *slow) {
		began := time.Now()

		window := func(hours int) string { return fmt.Sprintf("GET /hits:1/window?last=%dh", hours) }
		var asked, refused atomic.Int32
		var wg sync.WaitGroup
		for range 2 * bounds.QuestionsOfAddress.Max {
			wg.Go(func() {
				for time.Since(began) < 20*time.Second {
					if w := s.do(window(30+int(asked.Add(1))%2000), "", from(1)); w.Code == 429 {
						wantProblem(t, w, 429, "ask again later")
						if w.Header().Get("Retry-After") == "" {
							t.Error("a refusal lacks Retry-After")
						}

						refused.Add(1)
						time.Sleep(100 * time.Millisecond)
					}
				}
			})
		}

		for i := range 4 {
			time.Sleep(50 * time.Millisecond)
			const own = 3 * (takes + maxPause) // after one under way and one that waits
			for call, longest := range map[string]time.Duration{
				fmt.Sprintf("GET /hits:%d/range?step=1h", 2+i): own,
				// The busy address may give this one up first.
				window(30 + int(asked.Load())%2000): turnWait + own,
			} {
				at := time.Now()
				if w := s.do(call, "", from(2)); w.Code != 200 || time.Since(at) > longest {
					t.Errorf("the question %s of another address is answered %d after %s", call, w.Code, time.Since(at))
				}
			}
		}

		wg.Wait()
		if refused.Load() == 0 {
			t.Error("no question of the busy address was refused")
		}

		// All callers with the same question share an answer, however many they are.
		same := make(chan int)
		for range 3 * bounds.QuestionsOfAddress.Max {
			go func() { same <- s.do("GET /hits:9/window?last=1h", "", from(3)).Code }()
		}

		for range 3 * bounds.QuestionsOfAddress.Max {
			if code := <-same; code != 200 {
				t.Errorf("one of many callers with the same question got %d, want 200", code)
			}
		}
	})
}

// TestPublicTop: requests for top lists count as questions, and similar lengths of lists are the same question.
func TestPublicTop(t *testing.T) {
	slowly(t, func(t *testing.T, s *served, _ *slow) {
		for n := range 3 {
			s.want(fmt.Sprintf("POST /hits:%d/increment", n), fmt.Sprintf(`{"delta":%d}`, n+1), 200,
				one(fmt.Sprint("hits:", n), "sum", n+1, "1"))
		}

		get := func(n int, want string) {
			t.Helper()
			if w := s.do(fmt.Sprint("GET ", TopRoot, "?match=hits:*&last=1h&n=", n),
				""); text(w) != `{"match":"hits:*","last":"1h","top":[`+want+`]}` {
				t.Errorf("the list is answered %d %s, want %s", w.Code, w.Body, want)
			}
		}

		get(1, `{"key":"hits:2","value":3}`)
		s.want("POST /hits:0/increment", `{"delta":9}`, 200, one("hits:0", "sum", 10, "2"))
		// Another length of the same list, and still the old answer: a caller that varied n could otherwise have a list
		// computed each time.
		get(2, `{"key":"hits:2","value":3},{"key":"hits:1","value":2}`)
		time.Sleep(5 * time.Second)
		get(2, `{"key":"hits:0","value":10},{"key":"hits:2","value":3}`)
	})
}
