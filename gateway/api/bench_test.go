package api

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"headcount/internal/testkit"
)

// BenchmarkGetCounter measures a read of a page's count, from the router to the written answer.
func BenchmarkGetCounter(b *testing.B) {
	h, _ := serve(b, nil, Config{})
	r := httptest.NewRequest(http.MethodGet, "/p/counter", nil)
	w := &testkit.Unsent{}

	b.ReportAllocs()
	for b.Loop() {
		clear(w.Header())
		h.ServeHTTP(w, r)
	}
	if w.Status != http.StatusOK {
		b.Fatal(w.Status)
	}
}
