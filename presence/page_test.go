package presence

import (
	"errors"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestCheckPage(t *testing.T) {
	long := strings.Repeat("é", MaxPageLength)
	for page, ok := range map[string]bool{
		"a": true, "a/b?c=d#e": true, " ": true, "a b": true, long: true, "日本語": true, "\U0001F600": true,
		"e\u0301": true, "\u0301": true, "a\u200Db": true, "a\u200Cb": true,
		"**": true, "...": true, "--": true, "*a": true,
		strings.Repeat("\U0001F600", MaxPageLength): true,

		"": false, AllPages: false, "-": false, ".": false, "..": false,
		long + "x": false, strings.Repeat("x", 10_000): false,
		"a\nb": false, "\x00": false, "a\x7fb": false, "\u0085": false,
		"a\u00A0b": false, "a\u2028b": false, "\u3000": false,
		"\u200Da": false, "a\u200C": false, "\u200D": false, "a\u200Bb": false, "\uFEFFa": false, "a\uFFFDb": false,
		"\uE000": false, "\U000E0001": false, "\U0010FFFF": false, "\xff": false, "a\xc3": false, "\xed\xa0\x80": false,
	} {
		if err := CheckPage(page); (err == nil) != ok || err != nil && !errors.Is(err, ErrPage) {
			t.Errorf("CheckPage(%q) = %v, want ok=%v", page, err, ok)
		}
	}

	if CheckReadable(AllPages) != nil || CheckReadable("-") == nil {
		t.Error("of names that are no pages only * must be readable")
	}
}

func FuzzCheckPage(f *testing.F) {
	for _, page := range []string{"", "*", "a/b", "\u200Da", "a\u200Db", "\xff", "\uFFFD", strings.Repeat("é", 129)} {
		f.Add(page)
	}

	f.Fuzz(func(t *testing.T, page string) {
		if excerpt := Excerpt(page); !utf8.ValidString(excerpt) || utf8.RuneCountInString(excerpt) > MaxPageLength {
			t.Fatalf("Excerpt(%q) = %q", page, excerpt)
		}

		if CheckPage(page) != nil {
			return
		}

		// Every character of a valid page is visible, a space, or a joiner within the page.
		runes := []rune(page)
		if !utf8.ValidString(page) || len(runes) < 1 || len(runes) > MaxPageLength {
			t.Fatalf("CheckPage accepts %q", page)
		}

		for i, r := range runes {
			joiner := joins(r) && i > 0 && i < len(runes)-1
			visible := unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S)
			allowed := r == ' ' || joiner || visible
			if r == utf8.RuneError || !allowed {
				t.Fatalf("CheckPage accepts %q, with the invisible %U", page, r)
			}
		}

		if b := Bucket(page, DefaultBuckets); b < 0 || b >= DefaultBuckets {
			t.Fatalf("Bucket(%q) = %d, which is no bucket", page, b)
		}
	})
}
