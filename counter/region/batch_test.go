package region

import (
	"strings"
	"testing"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/counter/share"
)

// TestALargePageGoesOn: the next page begins with the counter that had no room in this page.
func TestALargePageGoesOn(t *testing.T) {
	large := share.Share{Kind: counter.Sum, Parts: []share.Part{{Region: strings.Repeat("x", maxBytes*2/3)}}}
	b := &batch{job: job{comparesAll: true}, asked: []string{"a", "b", "c", "d"}}
	b.fill(&owner.MoreAnswer{Shares: []share.Share{large, large, large, large}})

	var sent []string
	for _, row := range b.commit.Rows {
		sent = append(sent, row.Field)
	}
	if got := strings.Join(sent, " "); got != "a b" || b.nextPage != owner.After("", "b") || !b.more {
		t.Errorf("it has %q, and the next one begins after %q", got, b.nextPage)
	}
}
