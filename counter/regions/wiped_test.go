package regions_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"headcount/counter"
)

// Regions agree after one of them has lost all, also when one of the others had not heard its last changes, and while
// a third goes on.
func TestServerRegionsAgreeAfterAWipe(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, false)
	all := []*region{us, eu, ap}
	const keys = 20
	rules := []*counter.Rule{views, likes, visitors}
	for episode := range 2 {
		want := map[string]int64{}
		key := func(rule *counter.Rule, n int) string { return fmt.Sprintf("%s:%d-%d", rule.Kind, episode, n) }
		write := func(r *region, what, n int) { // of each kind once, as what is new
			make1(t, r.store, add(key(views, n), 1))
			make1(t, r.store, edit(likes, key(likes, n), members(what, what+1), nil))
			make1(t, r.store, edit(visitors, key(visitors, n), members(what, what+1), nil))
			for _, rule := range rules {
				want[key(rule, n)]++
			}
		}
		for n := range keys {
			for i, r := range all {
				write(r, i, n)
			}
		}
		agree(t, want, all...)
		if episode%2 == 1 { // eu does not hear the last changes of us, but ap does
			us.roads[eu.name].set(true)
			for n := range keys {
				write(us, 3, n)
			}
			agree(t, want, ap)
		}
		us.server.Flush(t)
		heal := rand.IntN(keys)
		for n := range keys {
			if n == heal {
				us.roads[eu.name].set(false)
			}
			write(eu, 4, n)
			want[key(likes, n)] -= 1 + int64(episode%2) // its set is lost, but what it had told of the others is not
			time.Sleep(time.Millisecond)
		}
		agree(t, want, all...)
	}
}
