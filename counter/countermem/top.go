package countermem

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"headcount/counter"
)

// top has the candidates and the top lists of one rule.
type top struct {
	marks map[int64]map[string]struct{}               // by time buckets that are not closed
	lists map[time.Duration]map[int64]counter.TopList // of closed time buckets
}

// Mark implements counter.TopStore.
func (s *Store) Mark(_ context.Context, match string, number int64, keys []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.unavailable("top")
	}
	is := s.top(match)
	if is.marks[number] == nil {
		is.marks[number] = map[string]struct{}{}
	}
	for _, key := range keys {
		if _, ok := is.marks[number][key]; !ok {
			is.marks[number][strings.Clone(key)] = struct{}{}
		}
	}
	return nil
}

// top returns the top of a rule. The caller holds mu.
func (s *Store) top(match string) *top {
	is := s.tops[match]
	if is == nil {
		is = &top{map[int64]map[string]struct{}{}, map[time.Duration]map[int64]counter.TopList{}}
		s.tops[strings.Clone(match)] = is
	}
	return is
}

// Marked implements counter.TopStore.
func (s *Store) Marked(_ context.Context, match string) (map[int64][]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, s.unavailable("top")
	}
	out := map[int64][]string{}
	for number, keys := range s.top(match).marks {
		out[number] = slices.Collect(maps.Keys(keys))
	}
	return out, nil
}

// KeepTop implements counter.TopStore.
func (s *Store) KeepTop(_ context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return s.unavailable("top")
	}
	is := s.top(match)
	if is.lists[step] == nil {
		is.lists[step] = map[int64]counter.TopList{}
	}
	now := s.now()
	maps.DeleteFunc(is.lists[step], func(number int64, _ counter.TopList) bool { return counter.Over(number, step, kept, now) })
	is.lists[step][list.Number] = list
	for _, key := range marks {
		delete(is.marks[list.Number], key)
	}
	if len(is.marks[list.Number]) == 0 {
		delete(is.marks, list.Number)
	}
	return nil
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(_ context.Context, match string, step time.Duration, from, to int64) ([]counter.TopList, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, s.unavailable("top")
	}
	var out []counter.TopList
	lists := s.top(match).lists[step]
	for number := from; number < to; number++ {
		if l, ok := lists[number]; ok {
			out = append(out, l)
		}
	}
	return out, nil
}

// Running implements counter.TopStore.
func (s *Store) Running(_ context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, s.unavailable("top")
	}
	slots := make([]counter.Slot, len(keys))
	for i, key := range keys {
		if r := s.counters[key]; r != nil {
			slots[i] = r.Slots.At(step)
		}
	}
	return slots, nil
}

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	return counter.HistoriesOf(ctx, s, keys, step, from, to)
}
