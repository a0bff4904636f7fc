package transfer

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"headcount/counter"
)

// restorer notes how many counters each of its transactions has.
type restorer struct {
	counter.Restorer
	transactions []int
}

func (r *restorer) Restore(_ context.Context, copies []counter.Copy, _ *counter.Rules) (int, error) {
	r.transactions = append(r.transactions, len(copies))
	return len(copies), nil
}

func (r *restorer) RestoreDeleted(context.Context, uint64) error { return nil }

// Transferred implements Progress.
func (r *restorer) Transferred(int, int, int64) {}

// TestAnImportOfLargeSets: an export has the hash of each member, so counters with large sets are imported one at a
// time.
func TestAnImportOfLargeSets(t *testing.T) {
	one := counter.Copy{Hashes: slices.Repeat([]string{strings.Repeat("0", 14)}, batchParts)}
	one.Kind = counter.Members
	one.Value = batchParts

	if got := transactionsOfTwo(t, one); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("the transactions have %v counters, want one each", got)
	}
}

// TestAnImportOfManyValues: each value of a dimension is a row, so counters with many values are imported one at a
// time.
func TestAnImportOfManyValues(t *testing.T) {
	one := counter.Copy{}
	one.Kind = counter.Sum
	for i := range batchParts / counter.MaxValues {
		counted := one.Dimension(fmt.Sprintf("d%02d", i))
		for j := range counter.MaxValues {
			counted.Values[strconv.Itoa(j)] = 1
		}
	}

	if got := transactionsOfTwo(t, one); !slices.Equal(got, []int{1, 1}) {
		t.Errorf("the transactions have %v counters, want one each", got)
	}
}

// transactionsOfTwo imports two counters like one, and returns how many counters each transaction had.
func transactionsOfTwo(t *testing.T, one counter.Copy) []int {
	t.Helper()
	lines := []string{`{"format":1,"at":"2030-10-10T12:11:42Z"}`}
	for _, key := range []string{"a", "b"} {
		one.Key = key
		one.Version = counter.Version{Incarnation: 1, Sequence: 1}
		text, err := json.Marshal(one)
		if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, string(text))
	}
	lines = append(lines, `{"counters":2,"deleted":0}`, "")

	var to restorer
	file := strings.NewReader(strings.Join(lines, "\n"))
	if err := Import(t.Context(), file, &to, counter.BuiltinRules(), nil, &to); err != nil {
		t.Fatal(err)
	}

	return to.transactions
}
