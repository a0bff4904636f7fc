package api

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// unsent is an answer that goes nowhere.
type unsent struct {
	header http.Header
	status int
}

func (u *unsent) Header() http.Header         { return u.header }
func (u *unsent) WriteHeader(status int)      { u.status = status }
func (u *unsent) Write(p []byte) (int, error) { return len(p), nil }

// A read of a page's count, from the router to the written answer.
func BenchmarkGetCounter(b *testing.B) {
	h, _ := serve(b, nil, Config{})
	r := httptest.NewRequest(http.MethodGet, "/p/counter", nil)
	w := &unsent{header: http.Header{}}

	b.ReportAllocs()
	for b.Loop() {
		clear(w.header)
		h.ServeHTTP(w, r)
	}
	if w.status != http.StatusOK {
		b.Fatal(w.status)
	}
}
