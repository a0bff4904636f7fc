package counter

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/rs/zerolog"
)

// listsOfHours is a store of top lists in which the minutes have lists. It notes for which hours lists are stored.
type listsOfHours struct {
	TopStore
	kept []int64
}

func (*listsOfHours) Marked(context.Context, string) (map[int64][]string, error) { return nil, nil }

func (*listsOfHours) TopLists(_ context.Context, _ string, step time.Duration, from, _ int64) ([]TopList, error) {
	if step == time.Hour {
		return nil, nil
	}

	return []TopList{{Number: from, Most: []Gained{{Key: "views:1", Value: 1}}}}, nil
}

func (*listsOfHours) Histories(
	_ context.Context, keys []string, _ time.Duration, from, _ int64,
) ([][]Gain, error) {
	all := make([][]Gain, len(keys))
	for i := range all {
		all[i] = []Gain{{Number: from, Value: 1}}
	}

	return all, nil
}

func (l *listsOfHours) KeepTop(
	_ context.Context, _ string, _ time.Duration, list TopList, _ time.Duration, _ []string,
) error {
	l.kept = append(l.kept, list.Number)

	return nil
}

// TestTopListsAfterTheClockWentBack: a clock was days ahead while lists of hours were made, and was then set. The lists
// of the hours from then on are made, before those of their minutes expire.
func TestTopListsAfterTheClockWentBack(t *testing.T) {
	rules := BuiltinRules()
	rule := rules.Find("views:1")
	store := &listsOfHours{}
	tracker := NewTopTracker(store, &Rules{}, zerolog.Nop())
	defer func() { _ = tracker.Close() }()

	hour := time.Now().Unix() / 3600
	of := &topOf{next: []int64{0, hour + 48}}
	for range 2 {
		if err := tracker.close(t.Context(), rule, of); err != nil {
			t.Fatal(err)
		}
	}

	// The last hour that has ended may end just now.
	last := hour - 2
	if n := slices.Index(store.kept, last); n < 0 {
		t.Errorf("lists are made of the hours %v, want %d among them", store.kept, last)
	}
	slices.Sort(store.kept)
	if once := slices.Compact(slices.Clone(store.kept)); len(once) < len(store.kept) {
		t.Errorf("lists are made of the hours %v, want each once", store.kept)
	}
}
