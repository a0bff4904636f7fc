package presence_test

import (
	"encoding/json"
	"strings"
	"testing"

	"headcount/presence"
)

func TestCheckUnicode(t *testing.T) {
	for text, good := range map[string]bool{
		``:                            true,
		`{"a":"b\n\"\\\u0041\u00e9"}`: true,
		`"\ud83d\ude00"`:              true,
		`"\uD83D\uDE00\ud83d\ude00"`:  true,
		`"\\ud800"`:                   true,
		`"\\\\ud800 \ud83d\ude00"`:    true,
		`"😀"`:                         true,
		`"\ufffd"`:                    true,
		`"\ud83d"`:                    false,
		`"\ude00"`:                    false,
		`"\ude00\ud83d"`:              false,
		`"\ud83d\ud83d\ude00"`:        false,
		`"\ud83dude00"`:               false,
		`"\ud83d\\ude00"`:             false,
		`"\\\ud83d"`:                  false,
		`"a","\udfff":1`:              false,
		"\"\xff\"":                    false,
		"\"\xed\xa0\x80\"":            false,
		`"\`:                          true, // invalid JSON is refused elsewhere
		`"\u`:                         true,
		`"\ud83d`:                     false,
	} {
		if err := presence.CheckUnicode([]byte(text)); (err == nil) != good {
			t.Errorf("%s gives %v, want the opposite", text, err)
		}
	}
}

// Accepted text is decoded without a replacement character, and refused text is not.
func FuzzCheckUnicode(f *testing.F) {
	f.Add(`\ud83d\ude00`)
	f.Add(`\\\ud83d\n`)

	f.Fuzz(func(t *testing.T, inner string) {
		var text string
		quoted := []byte(`"` + inner + `"`)
		if json.Unmarshal(quoted, &text) != nil {
			return
		}

		// The decoder replaces invalid text by U+FFFD. The text may contain U+FFFD itself, literally or escaped.
		before := strings.Count(inner, "\ufffd") + strings.Count(strings.ToLower(inner), `\ufffd`)
		replaced := strings.Count(text, "\ufffd") > before
		if err := presence.CheckUnicode(quoted); (err != nil) != replaced {
			t.Errorf("%s: %v", inner, err)
		}
	})
}
