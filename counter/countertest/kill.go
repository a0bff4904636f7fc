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
	"headcount/internal/testkit"
)

// placeOfClient is the variable that makes a test program a Client of the store in that place.
const placeOfClient = "HEADCOUNT_TEST_CLIENT_OF"

// Moved are the operations of id: one more on e:1, and a move from e:2 to e:3.
func Moved(id string) []counter.Op {
	return []counter.Op{with(id, op(add(exact, "e:1", 1), add(exact, "e:2", -1), add(exact, "e:3", 1)))}
}

// Whole checks that the operations of n ids were made, each once.
func Whole(t testing.TB, s counter.Reader, n int64) {
	t.Helper()
	for key, want := range map[string]int64{"e:1": n, "e:2": -n, "e:3": n} {
		value(t, s, key, want)
		if entries := chained(t, s, key); int64(len(entries)) != n {
			t.Errorf("%q has %d entries, want %d", key, len(entries), n)
		}
	}
}

// Client reports false unless KilledInALoop started this process. Then it makes the operations of moves in the store until
// it is killed, and prints which ids it tries and which were acknowledged. TestMain calls it first. served says that the
// store is a server.
func Client(served bool, moves func(id string) []counter.Op, open func(place string) (counter.Store, error)) bool {
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
				for _, o := range moves(id) {
					r := c.Do(context.Background(), o)
					// The server of a busy machine may not answer for a while.
					for end := time.Now().Add(time.Minute); errors.Is(r.Err, counter.ErrUnavailable) && served && time.Now().Before(end); {
						time.Sleep(time.Millisecond)
						r = c.Do(context.Background(), o)
					}
					if r.Err != nil {
						print("fault", r.Err)
						return
					}
				}
				print("ack", id)
			}
		})
	}
	wg.Wait()
	return true
}

// KilledInALoop kills a Client of the store at any moment, and repeats what was not acknowledged. Each operation
// is made once, which whole checks. open opens the store in this process, when no client runs. It returns the number of ids.
func KilledInALoop(
	t *testing.T, place string, rounds int, moves func(id string) []counter.Op, open func() counter.Store,
	whole func(t testing.TB, s counter.Reader, n int64),
) (made int64) {
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
		for id := range tried {
			for _, o := range moves(id) {
				var r counter.Result
				testkit.Eventually(t, "an answer", func() bool { r = do(t, s, o)[0]; return !errors.Is(r.Err, counter.ErrUnavailable) })
				if r.Err != nil || acknowledged[id] && !r.Replay {
					t.Fatalf("round %d: %s again, acknowledged %t: %+v", round, id, acknowledged[id], r)
				}
			}
		}
		made += int64(len(tried))
		whole(t, s, made)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d ids", made)
	return made
}
