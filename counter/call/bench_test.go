package call_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"headcount/counter"
)

// BenchmarkIncrement measures increments of one key, and of many, in the memory of the process.
func BenchmarkIncrement(b *testing.B) {
	rules := counter.BuiltinRules()
	for _, keys := range []int{1, 100_000} {
		b.Run(fmt.Sprintf("%d keys", keys), func(b *testing.B) { increment(b, inMemory(b, rules), rules, keys) })
	}
}

func increment(b *testing.B, store counter.Writer, rules *counter.Rules, keys int) {
	changes := make([]counter.Change, keys)
	for i := range changes {
		key := fmt.Sprint("views:", i)
		changes[i] = counter.Change{Key: key, Rule: rules.Find(key), Verb: counter.Add, Delta: 1}
	}

	for i := range changes {
		store.Apply(b.Context(), []counter.Op{{Changes: changes[i : i+1]}})
	}

	b.ReportAllocs()
	before := cpu(b)
	for i := 0; b.Loop(); i++ {
		at := i % keys
		result := store.Apply(b.Context(), []counter.Op{{Changes: changes[at : at+1]}})[0]
		if result.Err != nil {
			b.Fatal(result.Err)
		}
	}
	b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpu returns how much processor time this process has used. On a busy machine the elapsed time says little.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}

	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
