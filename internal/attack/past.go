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

	"github.com/rs/zerolog"

	"headcount/client"
	"headcount/counter"
	"headcount/counter/counterfile"
	"headcount/counter/counterredis"
	"headcount/counter/hyperloglog"
	"headcount/internal/benchenv"
	"headcount/internal/redisconn"
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
	{name: "questions about top", past: true, run: asked(func(n, i int) string {
		return fmt.Sprintf("top?match=views:*&last=%dh&n=100", hours-(200*i+n)%1000)
	})},
}

func asked(question func(n, i int) string) func(context.Context, string) {
	return visiting(askers, func(ctx context.Context, api *client.API, n, i int) error {
		_, err := api.Do(ctx, http.MethodGet, "/api/v1/"+question(n, i), nil, nil)
		return err
	})
}

// fillPast imports 90 days of hours of 100 sums and 2 uniques into the store that flags say, and adds the lists of what
// gained most, which an export does not have.
func (h *run) fillPast(ctx context.Context, dir string, flags ...string) error {
	name := filepath.Join(dir, "past.jsonl")
	if err := writePast(name); err != nil {
		return err
	}
	if err := benchenv.On(ctx, benchenv.ServerCore, h.program, append([]string{"import", "--file", name}, flags...)...).Run(); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	if err := h.fillTops(ctx, flags[1]); err != nil {
		return fmt.Errorf("lists of what gained most: %w", err)
	}
	return nil
}

// fillTops writes the list of every hour of the sums of writePast.
func (h *run) fillTops(ctx context.Context, where string) (err error) {
	var store counter.Store
	if h.redis {
		var conn *redisconn.Conn
		if conn, err = redisconn.Open(redisconn.Config{URL: where, Log: zerolog.Nop()}); err == nil {
			defer conn.Close()
			store = counterredis.New(counterredis.Config{Conn: conn, Log: zerolog.Nop()})
		}
	} else {
		store, err = counterfile.Open(where, counterfile.Config{Log: zerolog.Nop()})
	}
	if err != nil {
		return err
	}
	defer store.Close()
	var most []counter.Gained
	for i := pastSums - 1; i >= 0; i-- {
		most = append(most, counter.Gained{Key: pastKey(i), Value: pastGain(i)})
	}
	hour := time.Now().Unix() / 3600
	for at := hour - hours; at < hour; at++ {
		list := counter.TopList{Number: at, Most: most}
		if err := store.KeepTop(ctx, "views:*", time.Hour, list, hours*time.Hour, nil); err != nil {
			return err
		}
	}
	return nil
}

const pastSums = 100

func pastKey(i int) string { return fmt.Sprintf("views:%03d", i) }

// pastGain is what one of the sums gained in each hour.
func pastGain(i int) int64 { return int64(100 + i) }

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
	for i := range pastSums {
		c := counter.Copy{Key: pastKey(i), State: state(counter.Sum, 1)}
		for at := hour - hours; at < hour; at++ {
			c.Steps = append(c.Steps, counter.StepCopy{Step: 3600, Number: at, Value: pastGain(i)})
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
