package httppolicy

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func TestWantsHTML(t *testing.T) {
	for accept, want := range map[string]bool{
		"":    false,
		"*/*": false, // curl
		"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8":                       true,  // Firefox
		"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8": true,  // Chromium
		"text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2":                                  true,  // old Java
		"application/json, text/plain, */*":                                                     false, // axios
		"text/html":                                                                             true,
		"TEXT/HTML":                                                                             true,
		"text/html;charset=utf-8":                                                               true,
		"text/html;q=0.1":                                                                       true,
		"text/html;q=0":                                                                         false,
		"text/html;q=0.000":                                                                     false,
		"text/html; q=0, */*":                                                                   false,
		"application/json":                                                                      false,
		"application/json, text/html":                                                           false,
		"text/html, application/json":                                                           false,
		"text/html, application/json;q=0.9":                                                     true,
		"text/html;q=0.9, application/json":                                                     false,
		"text/html;q=0.9, application/json;q=0.8":                                               true,
		// HTML is as good as all other types, but it is named.
		"text/html, */*":                                     true,
		"text/html;q=0.5, */*;q=0.8":                         false,
		"text/html;q=0.5, */*;q=0.5":                         true,
		"text/html;q=0.5, */*;q=0.8, application/json;q=0.1": false, // another type is better still
		"text/html, application/*":                           true,
		"application/*, text/*":                              false,
		"text/*":                                             true,
		"text/*, */*;q=0.1":                                  true,
		"text/*, text/html;q=0":                              false, // the exact type decides
		"text/*;q=0, text/html":                              true,
		"image/png":                                          false,
		"image/png, */*;q=0.5":                               false,
		"application/problem+json, text/html":                true,
		"text/html;q=2":                                      false, // not a quality, so the element is ignored
		"text/html;q=":                                       false,
		"text/html;q=-1":                                     false,
		"text/html;q=1.5":                                    false,
		"text/html;Q=0.4, application/json;q=0.3":            true,
		"text/html;q=0.3333, application/json;q=0.3":         true,
		"text/html;q=NaN":                                    false,
		`text/html;x="a,b;q=0", application/json;q=0.5`:      true,
		`text/html;x="\",`:                                   true,
		",, ,text/html,,":                                    true,
		";q=1, =, ;":                                         false,
		"text/html;level=1;q=0.4, application/json;q=0.5":    false,
	} {
		if got := wantsHTML(accept); got != want {
			t.Errorf("wantsHTML(%q) = %v, want the opposite", accept, got)
		}
	}
}

func TestWantsGzip(t *testing.T) {
	for accept, want := range map[string]bool{
		"":                              false,
		"gzip":                          true,
		"GZIP":                          true,
		"x-gzip":                        true,
		"gzip, deflate, br, zstd":       true,
		"br":                            false,
		"identity":                      false,
		"*":                             true,
		"*;q=0":                         false,
		"gzip;q=0":                      false,
		"gzip;q=0, *":                   false,
		"*;q=0, gzip":                   true,
		"gzip;q=0.001":                  true,
		"gzip; q=0.5, identity":         false,
		"gzip; q=0.5, identity;q=0.5":   true,
		"*;q=0.5, identity":             false,
		"identity;q=0":                  false,
		"br;q=1.0, gzip;q=0.8, *;q=0.1": true,
		"gzip;q=x":                      false,
		"gzipped":                       false,
		"deflate, gzip;q=1.0, *;q=0.5":  true,
	} {
		if got := wantsGzip(accept); got != want {
			t.Errorf("wantsGzip(%q) = %v, want the opposite", accept, got)
		}
	}
}

func TestWantsBrotli(t *testing.T) {
	for accept, want := range map[string]bool{
		"":                              false,
		"br":                            true,
		"BR":                            true,
		"gzip, deflate, br, zstd":       true,
		"gzip":                          false,
		"*":                             false,
		"br;q=0":                        false,
		"br;q=0.5, gzip":                false,
		"br;q=0.5, gzip;q=0.5":          true,
		"br;q=0.5, identity":            false,
		"br;q=1.0, gzip;q=0.8, *;q=0.1": true,
	} {
		if got := wantsBrotli(accept); got != want {
			t.Errorf("wantsBrotli(%q) = %v, want the opposite", accept, got)
		}
	}
}

func TestAcceptMayHaveSeveralLines(t *testing.T) {
	r := &http.Request{Header: http.Header{"Accept": {"application/json;q=0.5", "text/html"}}}
	if !WantsHTML(r) {
		t.Error("the second Accept line is ignored")
	}
}

// Neither the order of the elements nor white space matters.
func TestPreferencesHaveNoOrder(t *testing.T) {
	elements := []string{
		"text/html", "text/html;q=0.5", "text/html;q=0", "text/*", "text/*;q=0.7", "application/json",
		"application/json;q=0.5",
		"application/*;q=0.6", "*/*", "*/*;q=0.5", "*/*;q=0", "gzip", "gzip;q=0", "*", "*;q=0.5", "identity",
		"identity;q=0.2", "x", "",
	}

	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.SampledFrom(elements), 0, 6).Draw(t, "list")
		other := rapid.Permutation(list).Draw(t, "other")
		a, b := strings.Join(list, ","), strings.ReplaceAll(strings.Join(other, " ,\t"), ";", " ; ")

		if wantsHTML(a) != wantsHTML(b) {
			t.Fatalf("wantsHTML of %q and %q differ", a, b)
		}

		if wantsGzip(a) != wantsGzip(b) {
			t.Fatalf("wantsGzip of %q and %q differ", a, b)
		}
	})
}

func FuzzNegotiate(f *testing.F) {
	f.Add("text/html,application/json;q=0.9,*/*;q=0.8")
	f.Add(`gzip;q=0.`)
	f.Add(`a;b="\`)
	f.Add(`;;;q=1;q=,"`)
	f.Add("text/html;q=0.99999999999999999999999999")

	f.Fuzz(func(t *testing.T, s string) {
		if wantsHTML(s) && !strings.Contains(strings.ToLower(s), "text/") {
			t.Fatalf("%q gets HTML, which it does not name", s)
		}

		if wantsGzip(s) && !strings.Contains(strings.ToLower(s), "gzip") && !strings.Contains(s, "*") {
			t.Fatalf("%q gets gzip, which it does not name", s)
		}

		for value, quality := range qualities(s) {
			if value == "" || quality < 0 || quality > 1 {
				t.Fatalf("%q is parsed to the element %q of quality %v", s, value, quality)
			}
		}
	})
}

func gunzip(t testing.TB, b []byte) []byte {
	t.Helper()
	r, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}

	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}

	return out
}

func TestGzipBytesAppends(t *testing.T) {
	src := []byte(strings.Repeat(`{"page":"p","count":715}`, 50))

	first := Gzip(nil, src)
	second := Gzip([]byte("before"), src)
	if !bytes.HasPrefix(second, []byte("before")) || !bytes.Equal(second[6:], first) {
		t.Fatal("the second result is not appended, or differs from the first")
	}

	if got := gunzip(t, first); !bytes.Equal(got, src) || len(first) >= len(src) {
		t.Fatalf("%d bytes, compressed from %d, were decompressed to %d", len(first), len(src), len(got))
	}
	if got := gunzip(t, Gzip(nil, nil)); len(got) != 0 {
		t.Fatalf("an empty text became %q", got)
	}
}

func TestGzipBytesByMany(t *testing.T) {
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			src := bytes.Repeat([]byte{byte(g)}, 1000*(g+1))
			var buf []byte
			for range 50 {
				buf = Gzip(buf[:0], src)
				if !bytes.Equal(gunzip(t, buf), src) {
					t.Error("a goroutine got the bytes of another one")
					return
				}
			}
		})
	}

	wg.Wait()
}
