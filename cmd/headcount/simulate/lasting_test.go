package simulate

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

func lastingCommand(f *fakeLasting) *Command {
	return &Command{
		URL: []string{f.URL}, Users: 8, Pages: 2, Duration: 400 * time.Millisecond, KillFraction: 0.2, Seed: 7,
		Scenario: "counters", APIKey: "key", settle: 300 * time.Millisecond,
	}
}

func TestAnHonestServerOfCountersPasses(t *testing.T) {
	t.Parallel()
	// On a busy machine a run may have too few calls for limits to refuse any.
	missing := []string{"calls", "calls_per_s", "p50_ms", "p99_ms", "retries", "replays", "refused", "cut_connections", "limit_passed", "limit_refused"}
	for runs := 0; len(missing) > 0; runs++ {
		if runs == 10 {
			t.Fatalf("in %d runs %q were 0", runs, missing)
		}
		c := lastingCommand(newFakeLasting(t))
		c.Duration, c.settle = roundTime+time.Second, 0
		r, err := run(t, c)
		if err != nil || !r.OK || r.WrongCounts != 0 {
			t.Fatalf("Run = %v, report %+v", err, r)
		}
		if len(r.Checkpoints) != 2 || r.Checkpoints[1].Name != "final" || r.Checkpoints[0].Counters != 10 || r.Counters != 10 {
			t.Errorf("report %+v", r)
		}
		missing = slices.DeleteFunc(missing, func(name string) bool { return r.Figures[name] > 0 })
		for _, name := range []string{"unavailable", "limited", "lost_connections"} {
			if n, ok := r.Figures[name]; !ok || n != 0 {
				t.Errorf("%s is %v", name, n)
			}
		}
	}
}

func TestEveryLieAboutCountersIsFoundOut(t *testing.T) {
	t.Parallel()
	for lie, says := range map[string]string{
		"loses one":                           "the acknowledged changes are",
		"counts a repetition":                 "the acknowledged changes are",
		"forgets keys":                        "made once more",
		"takes a first call for a repetition": "it was sent once",
		"passes the floor":                    "is below 0",
		"refuses what fits":                   "there was enough all the time",
		"makes half of a batch":               "the acknowledged changes are",
		"forgets a member":                    "the truth is true",
		"forgets an entry":                    "has",
		"skips a number":                      "follows entry",
		"writes a wrong entry":                "is not",
		"signs nothing":                       "cannot be",
		"reads too little":                    "exact value is 0",
		"reads old versions":                  "an earlier change had",
		"lags for ever":                       "a read of several counters says",
		"adds up wrongly":                     "the aggregate of",
		"tells no more":                       "the true value is",
		"lets versions fall":                  "version went back",
		"uses versions twice":                 "has the values",
		"stays stale":                         "(stale: true)",
		"tells something else":                "something else than a counter",
		"says mine of others'":                `"mine":`,
		"keeps what is deleted":               "after DELETE",
		"lets more pass":                      "have passed in one window",
		"lets too much pass in a short time":  "have passed in less than",
		"holds back what fits":                "had passed",
		"says that more is left":              "may still pass",
		"says another limit":                  "for a cost of",
	} {
		t.Run(lie, func(t *testing.T) {
			t.Parallel()
			f := newFakeLasting(t)
			f.lie = lie
			c := lastingCommand(f)
			var r Report
			for range 40 { // on a machine that stands still a run may have no chance to lie
				var err error
				r, err = run(t, c)
				if (err == nil) != r.OK || r.OK != (r.WrongCounts == 0) || err != nil && !errors.Is(err, ErrWrong) {
					t.Fatalf("Run = %v, report %+v", err, r)
				}
				if strings.Contains(strings.Join(r.Wrong, "\n"), says) {
					return
				}
				c.Seed++
				c.Duration = min(c.Duration*5/4, 5*time.Second)
			}
			t.Errorf("nothing wrong was found that says %q, but %q", says, r.Wrong)
		})
	}
}

func TestTroubleWithCountersIsNoWrongValue(t *testing.T) {
	t.Parallel()
	for _, ill := range []string{"unavailable", "unknown", "limits", "subscribers are cut off"} {
		t.Run(ill, func(t *testing.T) {
			t.Parallel()
			f := newFakeLasting(t)
			f.ill = ill
			c := lastingCommand(f)
			c.settle = 0
			if ill == "subscribers are cut off" {
				time.AfterFunc(200*time.Millisecond, f.drop)
			}
			r, err := run(t, c)
			if err != nil {
				t.Fatalf("Run = %v, %q", err, r.Wrong)
			}
			felt := map[string]float64{
				"unavailable": r.Figures["unavailable"], "unknown": r.Figures["lost_connections"], "limits": r.Figures["limited"],
				"subscribers are cut off": float64(r.Drops),
			}
			if felt[ill] == 0 || (ill == "limits") == (r.Checkpoints[0].Failures > 0) {
				t.Errorf("report %+v", r)
			}
		})
	}
}

func TestIdsThatAreForgottenEndTheRun(t *testing.T) {
	t.Parallel()
	f := newFakeLasting(t)
	f.lie = "forgets who is who"
	c := lastingCommand(f)
	c.Duration = 20 * time.Second
	time.AfterFunc(300*time.Millisecond, f.drop)
	if r, err := run(t, c); err == nil || !strings.Contains(r.Error, "--id-secret") {
		t.Errorf("Run = %v, report %+v", err, r)
	}
}

func TestWhatTheContractDoesNotKnowIsWrong(t *testing.T) {
	t.Parallel()
	f := newFakeLasting(t)
	f.ill = "breaks"
	if r, err := run(t, lastingCommand(f)); !errors.Is(err, ErrWrong) || !strings.Contains(r.Wrong[0], "status 500") {
		t.Errorf("Run = %v, %q", err, r.Wrong)
	}
}
