package redisconn

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Marks tell whether Redis still has what it acknowledged to this process. Each run of one of
// scripts.Marked writes a number of the process together with its own writes, see mark.lua. What Redis
// keeps on disk, and what a replica has, is always a beginning of what Redis carried out: while it has the number
// of the newest acknowledged run, it has everything from before, too. Any goroutine may call the methods.
type Marks struct {
	process string

	mu     sync.Mutex          // guards all below
	seen   map[string]struct{} // run ids of the servers reached so far; at most maxRuns
	number uint64              // of the newest run: Unix time in µs, so that a difference says how much is lost
	marks  map[string]*mark    // by key. One, or on a Cluster one for each hash tag of the scripts' keys
	runs   uint64              // as Runs says
	looked uint64              // runs at the last look
}

type mark struct {
	made   uint64 // the number that Look wrote; 0: the mark is not in Redis
	acked  uint64 // the newest number that is acknowledged
	before uint64 // acked when another run of a server answered, since the last look; 0: none did
	behind bool   // the last look found it missing or older
}

const (
	markLasts = 7 * 24 * time.Hour // without a run, as mark.lua has it
	markAgain = 24 * time.Hour     // after which a mark that no script writes is written again

	// maxRuns bounds Marks.seen. Beyond it all are forgotten, and count as new when they are reached again.
	maxRuns = 1000
)

// newMarks returns the marks of a process.
func newMarks() *Marks {
	return &Marks{process: rand.Text(), seen: map[string]struct{}{}, marks: map[string]*mark{}}
}

// Runs returns how often another run of a server answered. It changes before anything is sent there. A cache of what
// was read from Redis is void after that: the server may have older data.
func (m *Marks) Runs() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runs
}

// reached notes the run of a server that answers a new connection; it is empty when the server does not report it. What
// is acknowledged after another run has answered cannot be among what that server lost.
func (m *Marks) reached(run string) {
	m.mu.Lock()
	defer m.mu.Unlock()

	// An empty id is remembered like any other, so servers that report none count as one.
	if _, old := m.seen[run]; old {
		return
	}

	if len(m.seen) == maxRuns {
		clear(m.seen)
	}

	m.seen[run] = struct{}{}
	m.runs++

	for _, k := range m.marks {
		// Of several restarts the first counts: only what was acknowledged before it can be lost by it.
		k.before = cmp.Or(k.before, k.acked)
	}
}

// key returns the key of the mark for a script with these keys. On a Cluster the mark must be in their slot.
func (m *Marks) key(c *Client, keys []string) string {
	tag := "hc:{c}:"
	if c.Cluster != nil {
		tag = keys[0][:strings.IndexByte(keys[0], '}')+2]
	}

	return tag + "mark:" + m.process
}

func digits(number uint64) string { return fmt.Sprintf("%016d", number) }

// next returns the number for a run and the newest acknowledged number, or nothing while the mark is not in Redis yet.
func (m *Marks) next(key string) (number, acknowledged string) {
	m.mu.Lock()
	defer m.mu.Unlock()

	k := m.marks[key]
	if k == nil {
		// Look will write it. Until then the runs of this tag carry no mark.
		k = &mark{}
		m.marks[key] = k
	}
	if k.made == 0 {
		return "", ""
	}

	return digits(m.nextLocked()), digits(k.acked)
}

// nextLocked returns a number that is greater than all earlier ones.
func (m *Marks) nextLocked() uint64 {
	// Also when the clock goes back, because mark.lua and Look compare the numbers.
	m.number = max(m.number+1, uint64(time.Now().UnixMicro()))
	return m.number
}

// acknowledged records that Redis has answered the run with that number.
func (m *Marks) acknowledged(key, number string) {
	n, _ := strconv.ParseUint(number, 10, 64)

	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.marks[key]
	// Otherwise Look has found a loss meanwhile, and the mark begins anew.
	if k.made != 0 {
		k.acked = max(k.acked, n)
	}
}

// Kept is the result of Look.
type Kept struct {
	Restarted bool // a server has restarted, or another one has taken over, since the last Look
	// Lost is how far the lost writes reach back before the newest acknowledged write; 0: none are lost.
	Lost time.Duration
	// Missing says that Redis has no data of this process: it is empty, or was restored to a state before this process
	// began.
	Missing bool
}

// Look compares the marks in Redis with what was acknowledged, and rewrites those that show a loss. It reports a loss
// only when two Looks in a row have found it, because the first one may have asked a former master that lags behind the
// new one. If it returns an error, the findings up to that point are still valid.
func (m *Marks) Look(ctx context.Context, c *Client) (found Kept, err error) {
	var keys []string
	var were []mark
	// Copies from before the read: what is acknowledged during it may be missing in its answer.
	m.mu.Lock()
	runs := m.runs
	for key, k := range m.marks {
		if k.made != 0 {
			keys = append(keys, key)
			were = append(were, *k)
		}
	}
	m.mu.Unlock()

	numbers, err := readMarks(ctx, c, keys)
	if err != nil {
		return found, err
	}

	m.mu.Lock()
	unsure := false

	for i, key := range keys {
		k := m.marks[key]
		was := were[i]
		is := numbers[i]

		// was is from before the read: a number that was acknowledged since may not be in the reply.
		if is >= was.acked {
			k.behind = false
			// Otherwise another run of Redis has answered during the look, and before belongs to that run.
			if runs == m.runs {
				k.before = 0
			}
			continue
		}

		if !was.behind {
			k.behind = true
			unsure = true
			continue
		}

		found.Missing = found.Missing || is == 0
		newest := was.acked
		// What was acknowledged since the restart is there. The gap ends where the restart was.
		if was.before > is {
			newest = was.before
		}
		lost := time.Duration(newest-max(is, was.made)) * time.Microsecond
		found.Lost = max(found.Lost, lost, time.Microsecond) // something is lost, even if the difference in time is 0
		// mark.lua leaves a mark that shows a loss, so write makes a new one.
		*k = mark{}
	}

	// A restart is reported together with what it lost, by the second look.
	if !unsure {
		found.Restarted = runs != m.looked && len(keys) > 0
		m.looked = runs
	}
	m.mu.Unlock()
	return found, m.write(ctx, c)
}

// readMarks returns the numbers of marks in Redis; 0: there is none.
func readMarks(ctx context.Context, c *Client, keys []string) ([]uint64, error) {
	pipe := c.Pipeline()
	got := make([]*redis.StringCmd, len(keys))
	for i, key := range keys {
		got[i] = pipe.Get(ctx, key)
	}
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}

	numbers := make([]uint64, len(keys))
	for i, g := range got {
		// Exec returns the first error alone, which may be that of a missing mark while another one could not be read.
		if g.Err() != nil && !errors.Is(g.Err(), redis.Nil) {
			return nil, g.Err()
		}
		numbers[i], _ = strconv.ParseUint(g.Val(), 10, 64)
	}

	return numbers, nil
}

// write writes the marks that are missing or will expire soon.
func (m *Marks) write(ctx context.Context, c *Client) error {
	made := map[string]uint64{}
	pipe := c.Pipeline()

	// The lock is not held during the call, because each run of a script asks for the next number.
	m.mu.Lock()
	for key, k := range m.marks {
		// A mark that seems to be behind stays as it is: the second look needs the evidence.
		if k.made == 0 || !k.behind && k.acked < uint64(time.Now().Add(-markAgain).UnixMicro()) {
			made[key] = m.nextLocked()
			pipe.Set(ctx, key, digits(made[key]), markLasts)
		}
	}
	m.mu.Unlock()

	if len(made) == 0 {
		return nil
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return err
	}

	m.mu.Lock()
	defer m.mu.Unlock()

	// In the meantime, calls may have acknowledged greater numbers for the key.
	for key, number := range made {
		k := m.marks[key]
		k.made = cmp.Or(k.made, number)
		k.acked = max(k.acked, number)
	}

	return nil
}
