package counterpg

import (
	"fmt"
	"testing"
	"time"

	"headcount/counter/limit"
	"headcount/internal/pgtest"
)

// States that have ended leave the table, and one that was used since it was looked at stays.
func TestServerEndedLimitsAreSweptAway(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url) // it does not sweep in time
	call := limit.Call{Name: limit.Name{Key: "k", Algorithm: limit.Log, Window: time.Hour.Milliseconds()}, Limit: 2, Cost: 1}
	for range 3 {
		if r := s.Limit(t.Context(), []limit.Call{call})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	server.Exec(t, url, "update headcount_limits set due = 1")
	// More than one transaction forgets.
	server.Exec(t, url, fmt.Sprintf("insert into headcount_limits (key, algorithm, time_ms, due, ends) select n::text, 1, 1000, 1, 2 from generate_series(1, %d) n", 2*sweepRows+10))
	open(t, url, often)
	until(t, url, "select count(*) from headcount_limits", 1)
	until(t, url, "select count(*) from headcount_limits where due = ends", 1)
	if r := s.Limit(t.Context(), []limit.Call{call})[0]; r.Err != nil || r.Allowed {
		t.Errorf("what still counts was forgotten: %+v", r)
	}
}

// Times of calls on limits are rounded down: one that is rounded up would belong to a window that has not begun yet.
func TestServerTimesAreRoundedDown(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	const ahead = `select count(*) from generate_series(1, 1000) where ` + now + ` > extract(epoch from clock_timestamp()) * 1000`
	if n := pgtest.Query[int](t, url, ahead); n > 0 {
		t.Errorf("%d of 1000 times are in the future", n)
	}
}
