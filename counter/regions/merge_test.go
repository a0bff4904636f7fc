package regions_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

var (
	views    = &counter.Rule{Match: "*", Kind: counter.Sum}
	likes    = &counter.Rule{Match: "*", Kind: counter.Members}
	visitors = &counter.Rule{Match: "*", Kind: counter.Unique}
)

// open returns a store of a region that ends with the test.
func open(t testing.TB, region, url string) *counterredis.Store {
	t.Helper()
	s := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url), Region: region, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)})
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func make1(t testing.TB, s counter.Writer, c counter.Change) counter.Counter {
	t.Helper()
	r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
	if r.Err != nil {
		t.Fatalf("%+v: %v", c, r.Err)
	}
	return r.Counters[0]
}

func read1(t testing.TB, s counter.Reader, key string) counter.Counter {
	t.Helper()
	read, err := s.Read(t.Context(), []string{key}, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	return read[0].Counter
}

func add(key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: views, Verb: counter.Add, Delta: delta}
}

func edit(rule *counter.Rule, key string, join, leave []string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Edit, Join: join, Leave: leave}
}

func reset(rule *counter.Rule, key string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Reset, Reason: "r", By: "b"}
}

// replica is a region twice: in Redis, and as arithmetic.
type replica struct {
	name   string
	server *redistest.Server
	store  *counterredis.Store
	model  Region
	set    map[string]bool
}

// lines are all that a region tells of a key.
func (r *replica) lines(t testing.TB, bucket int) (lines []counterredis.Line) {
	t.Helper()
	scan := r.store.Scan(bucket)
	for more := true; more; {
		var some []counterredis.Line
		var err error
		if some, more, err = scan.Next(t.Context(), 10); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, some...)
	}
	return lines
}

// begin has a region say in its Redis which one it is, as its links do.
func (r *replica) begin(t testing.TB, bucket int) {
	t.Helper()
	if _, err := r.store.Outgoing(t.Context(), []int{bucket}, make([]counterredis.Position, 1), 1); err != nil {
		t.Fatal(err)
	}
}

// tell has a region take lines of another one.
func tell(t testing.TB, to *counterredis.Store, from, self string, bucket int, mode counterredis.Mode, lines []counterredis.Line) counterredis.Ack {
	t.Helper()
	told, err := to.Merge(t.Context(), from, self, []counterredis.Message{{Batch: counterredis.Batch{Bucket: bucket, Lines: lines}, Mode: mode, Word: "w"}})
	if err != nil {
		t.Fatal(err)
	}
	return told[0]
}

// TestServerRedisMergesAsTheArithmeticDoes makes random changes in three regions and carries what they tell at random, late,
// twice and out of order; also when a region loses its memory. What Redis has is what the model says.
func TestServerRedisMergesAsTheArithmeticDoes(t *testing.T) {
	var replicas []*replica
	for _, name := range []string{"us", "eu", "ap"} {
		server := redistest.Start(t)
		replicas = append(replicas, &replica{name: name, server: server, store: open(t, name, server.URL())})
	}
	for round, rule := range []*counter.Rule{views, likes, visitors, views, likes, views} {
		seed := uint64(round)
		t.Run(fmt.Sprint(rule.Kind, seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 7))
			key := "k" + strconv.Itoa(round)
			bucket := counterredis.BucketOf(key)
			type telling struct {
				from  string
				lines []counterredis.Line
				share Share
			}
			var said []telling
			for _, r := range replicas {
				r.server.Flush(t)
				r.model, r.set = Region{Name: r.name}, map[string]bool{}
				r.begin(t, bucket)
			}
			var words []string
			check := func(what string) {
				t.Helper()
				words = append(words, what)
				for _, r := range replicas {
					if got, want := read1(t, r.store, key).Value, r.model.Value(); got != want {
						t.Fatalf("%s has %d, and the arithmetic says %d: %+v\nafter %q", r.name, got, want, r.model, words)
					}
				}
			}
			now := func() uint64 { return uint64(time.Now().UnixMilli()) }
			hear := func(r *replica, said telling) {
				if told := tell(t, r.store, said.from, r.name, bucket, counterredis.ModePage, said.lines); told.Other != "" || told.Odd > 0 {
					t.Fatalf("%s takes nothing of %s: %+v", r.name, said.from, told)
				}
				r.model.Receive(said.share, now())
				if r.model.Size() == 0 {
					r.set = map[string]bool{}
				}
			}
			for range 120 {
				r := replicas[random.IntN(3)]
				what := random.IntN(20)
				ends := what > 15
				if ends { // no end is in the millisecond of what comes before or after it
					time.Sleep(2 * time.Millisecond)
				}
				switch {
				case what < 7 && rule.Kind == counter.Sum:
					delta := random.Int64N(9) + 1
					if what == 0 {
						delta = -delta
					}
					make1(t, r.store, add(key, delta))
					r.model.Add(delta, now())
					check(fmt.Sprint(r.name, " adds ", delta))
				case what < 7:
					name := strconv.Itoa(random.IntN(30))
					switch {
					case rule.Kind == counter.Unique:
						make1(t, r.store, edit(rule, key, []string{name}, nil))
						r.model.See(now(), name)
					case what < 5:
						make1(t, r.store, edit(rule, key, []string{name}, nil))
						if !r.set[name] {
							r.set[name] = true
							r.model.Join(1, now())
						}
					default:
						make1(t, r.store, edit(rule, key, nil, []string{name}))
						if r.set[name] {
							delete(r.set, name)
							r.model.Join(-1, now())
						}
					}
					check(fmt.Sprint(r.name, " edits ", name))
				case what < 10:
					said = append(said, telling{r.name, r.lines(t, bucket), r.model.Share})
				case what < 16 && len(said) > 0:
					one := said[random.IntN(len(said))]
					if one.from != r.name {
						hear(r, one)
						check(r.name + " hears " + one.from + fmt.Sprintf(" %+v", one.share))
					}
				case what == 16:
					if r.model.Value() == 0 {
						continue // it changes nothing, and what changes nothing is not told
					}
					make1(t, r.store, reset(rule, key))
					r.model.Reset(now())
					r.set = map[string]bool{}
					check(r.name + " resets")
				case what == 17:
					make1(t, r.store, counter.Change{Key: key, Rule: rule, Verb: counter.Delete})
					r.model.Delete(now())
					r.set = map[string]bool{}
					check(r.name + " deletes")
				case what == 18:
					r.server.Flush(t)
					r.begin(t, bucket)
					r.model.Lose()
					r.set = map[string]bool{}
					check(r.name + " loses all")
				}
				if ends {
					time.Sleep(2 * time.Millisecond)
				}
			}
			for range 3 {
				for _, a := range replicas {
					for _, b := range replicas {
						if a != b {
							hear(b, telling{a.name, a.lines(t, bucket), a.model.Share})
							check(b.name + " hears all of " + a.name)
						}
					}
				}
			}
			for _, r := range replicas[1:] {
				if got, want := read1(t, r.store, key).Value, read1(t, replicas[0].store, key).Value; got != want {
					t.Errorf("%s has %d, %s has %d", r.name, got, replicas[0].name, want)
				}
			}
		})
	}
}
