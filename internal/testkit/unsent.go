package testkit

import "net/http"

// Unsent is an http.ResponseWriter for benchmarks: it keeps the headers and the status, and drops the body.
type Unsent struct {
	header http.Header
	Status int // of the last answer
}

// Header implements http.ResponseWriter.
func (u *Unsent) Header() http.Header {
	if u.header == nil {
		u.header = http.Header{}
	}

	return u.header
}

// WriteHeader implements http.ResponseWriter.
func (u *Unsent) WriteHeader(status int) { u.Status = status }

// Write implements http.ResponseWriter.
func (u *Unsent) Write(p []byte) (int, error) { return len(p), nil }
