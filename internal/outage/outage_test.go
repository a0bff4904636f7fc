package outage

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
)

func TestOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := &Log{Log: zerolog.New(&out), What: "redis", Mend: "start it"}
		for _, attempt := range []struct {
			after time.Duration
			err   error
			want  string // empty: no line
		}{
			{0, nil, ""},
			{0, errors.New("refused"), `{"level":"warn","error":"refused","message":"redis cannot be used; start it"}`},
			{time.Second, errors.New("refused"), ""},
			{
				time.Minute - time.Second, errors.New("silent"),
				`{"level":"warn","error":"silent","for":"1m0s","message":"redis still cannot be used; start it"}`,
			},
			{time.Minute - time.Nanosecond, errors.New("silent"), ""},
			{
				time.Second, errors.New("silent"),
				`{"level":"warn","error":"silent","for":"2m1s","message":"redis still cannot be used; start it"}`,
			},
			{time.Second, nil, `{"level":"info","after":"2m2s","message":"redis works again"}`},
			{time.Second, nil, ""},
			{0, errors.New("refused"), `{"level":"warn","error":"refused","message":"redis cannot be used; start it"}`},
		} {
			time.Sleep(attempt.after)
			out.Reset()
			l.Note(attempt.err)
			if got := strings.TrimSpace(out.String()); got != attempt.want {
				t.Errorf("%v: %s, want %s", attempt.err, got, attempt.want)
			}
		}
	})
}

func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, broken := NewBreaker("redis"), errors.New("broken")

		call := func(err error) (let bool) {
			done, refused := b.Allow()
			if refused == nil {
				done(err)
			}
			return refused == nil
		}

		// Errors that are not the fault of the server do not count.
		for range TripAfter {
			if !call(ErrNotItsFault) || !call(broken) {
				t.Fatal("a call was refused before there were enough failures")
			}
		}

		<-b.Changed
		if b.Closed() || call(nil) {
			t.Fatal("a call was let through while the server is away")
		}

		time.Sleep(ProbeEvery + 1)
		if !call(broken) || call(nil) {
			t.Fatal("not exactly one call was let through")
		}

		time.Sleep(ProbeEvery + 1)
		if !call(nil) || !b.Closed() || !call(nil) {
			t.Fatal("a call that succeeded did not end the outage")
		}

		// Only the owner of the breaker sets causes.
		if b.LastFailure() != nil {
			t.Fatal("a failure was recorded without the owner")
		}

		if b.Failed(broken); b.LastFailure() != broken {
			t.Fatalf("the last failure is %v", b.LastFailure())
		}
	})
}
