package owner_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// meanwhile is a store for a reader. Before the reader gets a row of a set, something happens once.
type meanwhile struct {
	*rowsmem.Store
	happens func()
}

// Read implements rows.Store.
func (m *meanwhile) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	if happens := m.happens; happens != nil && strings.HasPrefix(addresses[0].Collection, "set:") {
		m.happens = nil
		happens()
	}

	return m.Store.Read(ctx, addresses)
}

// grows begins an owner of partition 0 and a counter that has one member, and returns a reader that meets the counter
// while it gets many more.
func grows(t *testing.T, kind counter.Kind, more int) *owner.Reader {
	t.Helper()
	store := rowsmem.New(rowsmem.Config{})
	o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1, SweepEvery: -1})
	t.Cleanup(o.Close)
	if err := o.Own(t.Context(), 0); err != nil {
		t.Fatal(err)
	}

	rule := &counter.Rule{Match: "*", Kind: kind}
	join := func(members ...string) {
		makes(t, o, []counter.Op{{Changes: []counter.Change{
			{Key: "k", Rule: rule, Verb: counter.Edit, Join: members},
		}}})
	}
	join("first")

	var members []string
	for i := range more {
		members = append(members, fmt.Sprint("m", i))
	}
	reads := &meanwhile{Store: store, happens: func() { join(members...) }}

	return owner.NewReader(reads, func(string) int { return 0 })
}

// TestAMemberIsFoundWhileTheSetGrows: a set grows between the two reads that look for a member, and so the member moves
// to another row. The answer is still that it is a member.
func TestAMemberIsFoundWhileTheSetGrows(t *testing.T) {
	for more := 100; more <= 1000; more += 100 {
		read, err := grows(t, counter.Members, more).Read(t.Context(), []string{"k"}, "first", 0)
		if err != nil {
			t.Fatal(err)
		}
		if !read[0].Mine {
			t.Errorf("among %d others the member is none, want that it is one", more)
		}
	}
}

// TestAUniqueGrowsWhileItIsRead: the registers of a unique are distributed over several rows after an aggregate has
// read its head. The aggregate has all of them.
func TestAUniqueGrowsWhileItIsRead(t *testing.T) {
	const more = 1000
	is, err := grows(t, counter.Unique, more).Aggregate(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if is.Value < more*95/100 {
		t.Errorf("the aggregate is %d, want about %d", is.Value, more+1)
	}
}
