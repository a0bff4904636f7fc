//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/benchenv"
)

const (
	hours  = 90 * 24 // of history
	askers = 64      // of questions about it
)

func init() {
	attacks = append(attacks,
		attack{name: "one question", past: true, run: visiting(askers, func(_, _ int) string {
			return "GET /api/v1/counters/visitors:1/window?last=90d HTTP/1.1\r\n"
		})},
		attack{name: "many questions", past: true, run: visiting(askers, func(n, i int) string {
			return fmt.Sprintf("GET /api/v1/counters/visitors:%d/range?step=%dh HTTP/1.1\r\n", n%2, 1+i%30)
		})},
		attack{name: "questions about top", past: true, run: visiting(askers, func(n, i int) string {
			return fmt.Sprintf("GET /api/v1/top?match=views:*&last=%dh&n=100 HTTP/1.1\r\n", hours-(200*i+n)%1000)
		})},
	)
}

// fillPast imports 90 days of hours of 100 sums and 2 uniques into the store that flags say.
func (h *run) fillPast(ctx context.Context, dir string, flags ...string) error {
	name := filepath.Join(dir, "past.jsonl")
	if err := writePast(name); err != nil {
		return err
	}
	if err := benchenv.On(ctx, benchenv.ServerCore, h.program, append([]string{"import", "--file", name}, flags...)...).Run(); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	return nil
}

func writePast(name string) error {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer file.Close()
	out, now, n := bufio.NewWriter(file), time.Now(), 0
	var faults error
	line := func(is any) {
		text, err := json.Marshal(is)
		if err != nil && faults == nil {
			faults = err
		}
		_, _ = out.Write(append(text, '\n')) // Flush says it
	}
	line(map[string]any{"format": 1, "at": now.UTC()})
	hour := now.Unix() / 3600
	state := func(kind counter.Kind, value int64) counter.State {
		return counter.State{Kind: kind, Value: value, Updated: now.UnixMilli(), Version: counter.Version{Incarnation: 1, Sequence: 1}}
	}
	for i := range 100 {
		c := counter.Copy{Key: fmt.Sprintf("views:%03d", i), State: state(counter.Sum, 1)}
		for at := hour - hours; at < hour; at++ {
			c.Steps = append(c.Steps, counter.StepCopy{Step: 3600, Number: at, Value: int64(100 + i)})
		}
		line(c)
		n++
	}
	var seen hyperloglog.Registers // dense: 12 KB
	for i := range 3000 {
		seen.Add(strconv.Itoa(i))
	}
	for i := range 2 {
		c := counter.Copy{Key: fmt.Sprintf("visitors:%d", i), State: state(counter.Unique, seen.Count()), Registers: seen}
		for at := hour - hours; at < hour; at++ {
			c.Steps = append(c.Steps, counter.StepCopy{Step: 3600, Number: at, Seen: &seen})
		}
		line(c)
		n++
	}
	line(map[string]int{"counters": n, "deleted": 0})
	if err := out.Flush(); err != nil {
		return err
	}
	return faults
}
