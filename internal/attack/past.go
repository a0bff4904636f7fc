//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"headcount/client"
	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/benchenv"
)

const (
	hours  = 90 * 24 // of history
	askers = 64      // of questions about it
)

// asking are attacks by questions that cost much to answer.
var asking = []attack{
	{name: "one question", past: true, run: asked(func(_, _ int) string { return "counters/visitors:1/window?last=90d" })},
	{name: "many questions", past: true, run: asked(func(n, i int) string {
		return fmt.Sprintf("counters/visitors:%d/range?step=%dh", n%2, 1+i%30)
	})},
}

func asked(question func(n, i int) string) func(context.Context, string) {
	return visiting(askers, func(ctx context.Context, api *client.API, n, i int) error {
		_, err := api.Do(ctx, http.MethodGet, "/api/v1/"+question(n, i), nil, nil)
		return err
	})
}

// fillPast imports 90 days of hours of 2 uniques into the store that flags say.
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
	out, now := bufio.NewWriter(file), time.Now()
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
	var seen hyperloglog.Registers // dense: 12 KB
	for i := range 3000 {
		seen.Add(strconv.Itoa(i))
	}
	for i := range 2 {
		c := counter.Copy{Key: fmt.Sprintf("visitors:%d", i), Registers: seen, State: counter.State{
			Kind: counter.Unique, Value: seen.Count(), Updated: now.UnixMilli(), Version: counter.Version{Incarnation: 1, Sequence: 1},
		}}
		for at := hour - hours; at < hour; at++ {
			c.Steps = append(c.Steps, counter.StepCopy{Step: 3600, Number: at, Seen: &seen})
		}
		line(c)
	}
	line(map[string]int{"counters": 2, "deleted": 0})
	if err := out.Flush(); err != nil {
		return err
	}
	return faults
}
