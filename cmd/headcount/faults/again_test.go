package faults

import (
	"fmt"
	"testing"
	"time"

	"headcount/internal/redistest"
)

// TestClockFaultsAgain repeats faults, one after the other, while users come and go. make test-all runs each once;
//
//	go test ./cmd/headcount/faults -run TestClockFaultsAgain -v -count 1 -timeout 60m -rounds 40
//
// prints how long each of twenty rounds took.
func TestClockFaultsAgain(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, redistest.Durable...)
	top := newTopology(t, redis.URL(), nil)
	for round := range max(1, *rounds/2) {
		for name, damage := range map[string]func(){
			"Redis out of memory for 3 s": func() {
				redis.Do(t, "CONFIG", "SET", "maxmemory", "1")
				time.Sleep(3 * time.Second)
				redis.Do(t, "CONFIG", "SET", "maxmemory", "0")
			},
			"the endpoint store emptied": func() {
				for _, key := range redis.Do(t, "KEYS", "hc:*:e").([]any) {
					redis.Do(t, "DEL", key)
				}
			},
		} {
			top.suffer(t, fault{
				name: fmt.Sprint(name, ", ", round), since: "it was over", during: time.Second,
				damage: func(*testing.T) time.Time {
					damage()
					return time.Now()
				},
				mend: func(t *testing.T) { awaitReady(t, top.members...) },
			})
		}
	}
}
