package regions

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
)

// The lag is that of what is left to tell, however steadily changes come.
func TestLag(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		l := newLink(&Store{cfg: Config{Log: zerolog.Nop()}}, Peer{Name: "eu"}, newMetrics(registry))
		shows := func(want float64) {
			t.Helper()
			l.gauge()
			families, err := registry.Gather()
			if err != nil {
				t.Fatal(err)
			}
			got := -1.0
			for _, f := range families {
				if f.GetName() == "headcount_counters_region_lag_seconds" {
					got = f.GetMetric()[0].GetGauge().GetValue()
				}
			}
			if got != want {
				t.Errorf("the lag is %v s, not %v s", got, want)
			}
		}
		var since time.Time
		for range 3 {
			l.changed(1)
			time.Sleep(time.Second)
			_, since = l.take(false)
			l.changed(1) // while the round is told
			shows(0)
		}
		l.again([]int{2}, since) // of which something could not be told
		shows(1)
		_, since = l.take(false)
		shows(0)
		l.again(nil, since)
		shows(0)
		l.again([]int{1}, time.Time{}) // a look has found it: nobody knows since when
		time.Sleep(time.Second)
		shows(1)
		_, since = l.take(false)
		l.needsAll(1, since)
		shows(1)
		l.take(false)
		time.Sleep(time.Second)
		shows(2)
	})
}
