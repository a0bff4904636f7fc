package counter

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// TestBadCopiesAreShortErrors: an import prints the error, which must not repeat a whole line of the file.
func TestBadCopiesAreShortErrors(t *testing.T) {
	long := strings.Repeat("x", 45_000)
	const good = `"kind":"sum","version":"1-1"`
	for _, fields := range []string{
		`"key":"` + long + `",` + good,
		`"site":"` + long + `","key":"a",` + good,
		`"key":"a","kind":"` + long + `","version":"1-1"`,
		`"key":"a","kind":"sum","version":"` + long + `"`,
		`"key":"a","kind":"sum","version":"0-0"`,
		`"key":"a","kind":"sum","version":"1-` + long + `"`,
		`"key":"a","slots":"` + long + `",` + good,
		`"key":"a","elsewhere":"` + long + `",` + good,
		`"key":"a","ledger":[{"op":"` + long + `"}],` + good,
		`"key":"a","dimensions":[{"name":"` + long + `"}],` + good,
		`"key":"a","kind":"members","version":"1-1","value":1,"members":["` + long + `"]`,
		`"key":"a","kind":"members","version":"1-1","value":1,"hashes":["` + long + `"]`,
		`"key":"a","kind":"unique","version":"1-1","registers":"` + strings.Repeat("AAAA", 10_000) + `"`,
	} {
		var c Copy
		err := json.Unmarshal([]byte("{"+fields+"}"), &c)
		if text := fmt.Sprint(err); err == nil || len(text) > 400 || strings.Contains(text, "%!") {
			t.Errorf("%.60s…: %.500s, want a short error", fields, text)
		}
	}
}
