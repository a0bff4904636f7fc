package bounds

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"headcount/gateway/calls"
)

// numbers returns the numbers of a row.
func (b *Bound) numbers() []string {
	var all []string
	for _, n := range []int{b.PerSecond, b.Burst, b.Max} {
		if n > 0 {
			all = append(all, strconv.Itoa(n))
		}
	}

	return all
}

var number = regexp.MustCompile(`\d+`)

// A sentence to a client has its row's numbers, and it can be told as a status or as the code of an error frame.
func TestSentencesHaveTheNumbersOfTheirRows(t *testing.T) {
	for _, b := range Table {
		for _, n := range number.FindAllString(b.Says, -1) {
			if !slices.Contains(b.numbers(), n) {
				t.Errorf("%s: the sentence says %s, and the row has %v", b.Of, n, b.numbers())
			}
		}
		if b.Is != nil && b.Is != calls.ErrBodies && calls.CodeOf(b.Is) == "" {
			t.Errorf("%s: nothing is known about %q", b.Of, b.Is)
		}
	}
}

// The page about bounds has a row of the same name for each row of the table, with the same numbers.
func TestBoundsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/bounds.md")
	if err != nil {
		t.Fatal(err)
	}

	page := strings.Split(string(text), "\n")

	for _, b := range Table {
		at := slices.IndexFunc(page, func(line string) bool { return strings.HasPrefix(line, "| "+b.Of+" |") })
		if at < 0 {
			t.Errorf("docs/bounds.md has no row %q", b.Of)
			continue
		}

		line := strings.ReplaceAll(page[at], ",", "") // 10,000 in a text
		said := number.FindAllString(line, -1)
		for _, n := range b.numbers() {
			if !slices.Contains(said, n) {
				t.Errorf("docs/bounds.md does not say %s in the row %q, which says %v", n, b.Of, said)
			}
		}
	}
}
