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

// numbers returns all numbers of a bound.
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

// The sentence for clients has the numbers of its bound, and its error has a status and a code for frames.
func TestSentencesHaveTheNumbersOfTheirRows(t *testing.T) {
	for _, b := range Table {
		for _, n := range number.FindAllString(b.Says, -1) {
			if !slices.Contains(b.numbers(), n) {
				t.Errorf("%s: the sentence has the number %s, and the bound %v", b.Of, n, b.numbers())
			}
		}
		if b.Is != nil && b.Is != calls.ErrBodies && calls.CodeOf(b.Is) == "" {
			t.Errorf("%s: there is no code for the error %q", b.Of, b.Is)
		}
	}
}

// docs/bounds.md has a row of the same name for each bound, with the same numbers.
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
				t.Errorf("docs/bounds.md lacks %s in the row %q, which has %v", n, b.Of, said)
			}
		}
	}
}
