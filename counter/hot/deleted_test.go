package hot

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/redisstore"
	"headcount/presence/redistest"
)

// TestDeletedElsewhere while the sum is spread here. What its parts take before everybody here knows counts in its next life; when
// that is nothing, nobody has touched it. The parts end either way.
func TestDeletedElsewhere(t *testing.T) {
	for name, url := range map[string]string{"one server": redistest.Single(t).URL(), "three masters": redistest.ThreeMasters(t).URL()} {
		for _, made1 := range []bool{true, false} {
			t.Run(fmt.Sprint(name, " ", made1), func(t *testing.T) {
				redis, err := redisstore.Open(redisstore.Config{URL: url, Region: "us"})
				if err != nil {
					t.Fatal(err)
				}
				a := process{newStore(redis, redis, Config{Rate: 1000, Rules: rules, Cool: time.Hour}), redis}
				t.Cleanup(func() { a.Close() })
				other, err := redisstore.Open(redisstore.Config{URL: url, Region: "us"})
				if err != nil {
					t.Fatal(err)
				}
				b := process{newStore(other, other, Config{Rate: 1000, Rules: rules, Cool: time.Hour}), other}
				t.Cleanup(func() { b.Close() })
				key := t.Name()
				bucket := redisstore.BucketOf(key)
				if _, err := redis.Outgoing(t.Context(), []int{bucket}, make([]redisstore.Position, 1), 1); err != nil { // it has its name now
					t.Fatal(err)
				}
				made(t, a, add(key, 100))
				a.opens(t, key)
				b.phase(t, key) // b knows it now, too
				for range 20 {
					made(t, a, add(key, 3))
				}
				if err := a.gather(t.Context(), []string{key}); err != nil {
					t.Fatal(err)
				}
				was := exactly(t, a, key, 160).Version

				died := fmt.Sprint(was.Incarnation + 1)
				told, err := redis.Tell(t.Context(), "eu", "us", []redisstore.Telling{{
					Batch: redisstore.Batch{Bucket: bucket, Lines: []redisstore.Line{{key, "", "0", died, "0", "", ""}}}, Mode: redisstore.TellAll,
				}})
				if err != nil || !told[0].Merged {
					t.Fatalf("%+v, %v", told, err)
				}
				if c := read(t, other, key, 0); c.Version.Sequence != 0 || c.Value != 0 {
					t.Errorf("the record says %+v", c)
				}
				want := int64(0)
				if made1 {
					for range 10 {
						made(t, b, add(key, 2)) // to parts, of which nobody has told b
					}
					want = 20
				}
				look := func(when string) {
					t.Helper()
					c := exactly(t, a, key, want)
					if made1 && c.Version.Incarnation <= was.Incarnation || !made1 && c != (counter.Counter{Key: key}) {
						t.Errorf("%s %+v after %v", when, c, was)
					}
					if all, err := a.Aggregate(t.Context(), key); err != nil || all.Value != want || all.Counters != min(want, 1) {
						t.Errorf("%s all are %+v, %v", when, all, err)
					}
				}
				look("at once")
				if err := a.lookAround(t.Context()); err != nil { // whoever owns the bucket
					t.Fatal(err)
				}
				if err := a.tick(t.Context()); err != nil {
					t.Fatal(err)
				}
				if is := a.phase(t, key); is == counter.Open || is == counter.Closing {
					t.Errorf("phase %c", is)
				}
				look("folded")
				if hot, err := redis.Hot(t.Context(), []int{bucket}); err != nil || strings.Contains(fmt.Sprint(hot), key) {
					t.Errorf("%v are hot, %v", hot, err)
				}
				parts, err := redis.Parts(t.Context(), []string{key})
				if err != nil {
					t.Fatal(err)
				}
				for i, p := range parts[0] {
					if p.Open {
						t.Errorf("part %d is open", i)
					}
				}
				made(t, b, add(key, 1)) // wherever b takes it to
				exactly(t, b, key, want+1)
			})
		}
	}
}
