package countertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/counter"
)

// placeOfClient is the variable that makes a test program a Client of the store in that place.
const placeOfClient = "HEADCOUNT_TEST_CLIENT_OF"

// Moved is the operation of id: one more on e:1, and a move from e:2 to e:3.
func Moved(id string) counter.Op {
	return with(id, op(add(exact, "e:1", 1), add(exact, "e:2", -1), add(exact, "e:3", 1)))
}

// Whole checks that n operations were made, each once.
func Whole(t testing.TB, s counter.Reader, n int64) {
	t.Helper()
	for key, want := range map[string]int64{"e:1": n, "e:2": -n, "e:3": n} {
		value(t, s, key, want)
		if entries := chained(t, s, key); int64(len(entries)) != n {
			t.Errorf("%q has %d entries, want %d", key, len(entries), n)
		}
	}
}

// Client reports false unless KilledInALoop started this process. Then it changes counters of the store until
// it is killed, and prints what it tries and what was acknowledged. TestMain calls it first. served says that the
// store is a server.
func Client(served bool, open func(place string) (counter.Store, error)) bool {
	place := os.Getenv(placeOfClient)
	if place == "" {
		return false
	}
	s, err := open(place)
	if err != nil {
		fmt.Println("fault", err)
		return true
	}
	c := counter.NewCombiner(s, counter.CombinerConfig{Queues: 4})
	var say sync.Mutex
	print := func(what string, text any) {
		say.Lock()
		defer say.Unlock()
		fmt.Println(what, text)
	}
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				id := fmt.Sprintf("%d/%d/%d", os.Getpid(), worker, n)
				print("try", id)
				r := c.Do(context.Background(), Moved(id))
				// The server of a busy machine may not answer for a while.
				for end := time.Now().Add(time.Minute); errors.Is(r.Err, counter.ErrUnavailable) && served && time.Now().Before(end); {
					time.Sleep(time.Millisecond)
					r = c.Do(context.Background(), Moved(id))
				}
				if r.Err != nil {
					print("fault", r.Err)
					return
				}
				print("ack", id)
			}
		})
	}
	wg.Wait()
	return true
}

// KilledInALoop kills a Client of the store at any moment, and repeats what was not acknowledged. Each operation
// is made once. open opens the store in this process, when no client runs.
func KilledInALoop(t *testing.T, place string, rounds int, open func() counter.Store) {
	var made int64
	for round := range rounds {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), placeOfClient+"="+place)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		tried, acknowledged := map[string]bool{}, map[string]bool{}
		lines := bufio.NewScanner(out)
		end := 40 + rand.IntN(400)
		for n := 0; lines.Scan(); n++ {
			what, id, _ := strings.Cut(lines.Text(), " ")
			switch what {
			case "try":
				tried[id] = true
			case "ack":
				delete(tried, id)
				acknowledged[id] = true
			default:
				t.Errorf("round %d: %s", round, lines.Text())
			}
			if n == end {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // it was killed
		s := open()
		for id := range acknowledged {
			if r := do(t, s, Moved(id))[0]; r.Err != nil || !r.Replay {
				t.Fatalf("round %d: %s was acknowledged, and is not remembered: %+v", round, id, r)
			}
		}
		for id := range tried {
			if r := do(t, s, Moved(id))[0]; r.Err != nil {
				t.Fatal(r.Err)
			}
		}
		made += int64(len(acknowledged) + len(tried))
		Whole(t, s, made)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d operations", made)
}
