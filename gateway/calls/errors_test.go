package calls

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
)

// answered returns the answer to a call whose handler returns err.
func answered(method string, err error) *httptest.ResponseRecorder {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	fails := func(*gin.Context) (Answer, error) { return NoContent, err }
	Register(e, zerolog.Nop(), []Call{{Method: method, Path: "/{key}", Do: fails}})

	w := httptest.NewRecorder()
	e.ServeHTTP(w, httptest.NewRequest(method, "/a", nil))

	return w
}

// One table says what an error means, however deeply it is wrapped. The sentence for the client and further headers
// come from the code that refuses.
func TestErrorsBecomeStatuses(t *testing.T) {
	away := fmt.Errorf("reading: %w", counter.ErrUnavailable)
	full := &counter.Conflict{Is: counter.ErrBound, Key: "stock:1", Value: 7, Text: "its ceiling is 7"}
	late := fmt.Errorf("reading: %w", context.DeadlineExceeded)
	gone := fmt.Errorf("reading: %w", context.Canceled)
	expired := fmt.Errorf("%w: it is expired", identity.ErrBadToken)

	for name, tc := range map[string]struct {
		method        string
		err           error
		status        int
		header, value string
		detail        string
	}{
		"a sentence": {"POST", Bad("Send a page."), 400, "", "", "Send a page."},
		"no token": {"PUT", identity.ErrNoToken, 401, "WWW-Authenticate", `Bearer realm="headcount"`,
			"no token"},
		"a bad token":   {"GET", expired, 401, "WWW-Authenticate", badToken, "bad token: it is expired"},
		"keys are away": {"GET", identity.ErrKeysAway, 503, "Retry-After", "5", "cannot be fetched"},
		"a wrong key": {"GET", Refuse(ErrNoKey, "wrong"), 401, "WWW-Authenticate",
			`API-Key realm="headcount"`, "wrong"},
		"another site": {"GET", Refuse(ErrOtherSite, "Elsewhere."), 403, "", "", "Elsewhere."},
		"a change is refused": {"POST", full, 409, "", "",
			"Nothing was changed: a bound refuses the change: its ceiling"},
		"a read has no answer": {"GET", full, 409, "", "", "There is no answer: "},
		"a large body":         {"POST", Refuse(ErrTooLarge, "Too long."), 413, "Connection", "close", "Too long."},
		"the store is away":    {"GET", Refuse(away, "Try again."), 503, "Retry-After", "1", "Try again."},
		"later than usual": {
			"GET", Refuse(ErrUnavailable, "Full.",
				httppolicy.RetryAfter(5*time.Second)), 503, "Retry-After", "5", "Full.",
		},
		"the time is over":      {"GET", late, 503, "Retry-After", "1", lateDetail},
		"the client has gone":   {"GET", gone, 503, "", "", lateDetail},
		"a defect says nothing": {"GET", errors.New("secret"), 500, "", "", httppolicy.DefectDetail},
	} {
		t.Run(name, func(t *testing.T) {
			w := answered(tc.method, tc.err)

			if w.Code != tc.status || !strings.Contains(w.Body.String(), tc.detail) {
				t.Errorf("%d %s, want %d %q", w.Code, w.Body, tc.status, tc.detail)
			}

			if got := w.Header().Get(tc.header); tc.header != "" && got != tc.value {
				t.Errorf("%s: %q, want %q", tc.header, got, tc.value)
			}

			// Every refusal has the form of RFC 9457.
			if got := w.Header().Get("Content-Type"); got != "application/problem+json" {
				t.Errorf("Content-Type is %q, want application/problem+json", got)
			}
		})
	}
}

// Malformed data is logged, once for many calls. The client only learns that the store cannot be used.
func TestMalformedDataIsLogged(t *testing.T) {
	var log bytes.Buffer
	cause := fmt.Errorf("owner: head of %q: %w", "views:1", counter.ErrMalformed)
	serve := Serve(zerolog.New(&log), func(*gin.Context) (Answer, error) {
		return Answer{}, Refuse(fmt.Errorf("%w: %w", ErrUnavailable, cause), "The store cannot be reached.")
	})

	// Three calls cause one line of the log.
	for range 3 {
		w := httptest.NewRecorder()
		c := gin.CreateTestContextOnly(w, gin.New())
		c.Request = httptest.NewRequest(http.MethodGet, "/", nil)
		serve(c)
		if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "1" {
			t.Errorf("the answer is %d %v, want 503 with Retry-After 1", w.Code, w.Header())
		}
	}

	const said = `views:1\": the store has malformed data`
	if strings.Count(log.String(), `"level":"error"`) != 1 || !strings.Contains(log.String(), said) {
		t.Errorf("want one line of the log about the malformed data: %s", &log)
	}
}

// Every code of an error frame belongs to an error, and every error has its code in the list.
func TestCodesOfFrames(t *testing.T) {
	used := map[string]bool{}
	for _, m := range meanings {
		used[m.code] = true
	}

	delete(used, "") // errors that no message can cause have no code

	for _, code := range Codes {
		if !used[code] {
			t.Errorf("no error has the code %s", code)
		}

		delete(used, code)
	}

	if len(used) > 0 {
		t.Errorf("Codes lacks %v", used)
	}
}

// Each row of the table is used: none stands behind a row that fits its error as well.
func TestEveryMeaningIsReached(t *testing.T) {
	for _, m := range meanings {
		if got := meaningOf(fmt.Errorf("wrapped: %w", m.of)); got != m {
			t.Errorf("%v: %+v, want %+v", m.of, got, m)
		}
		if http.StatusText(m.status) == "" {
			t.Errorf("%v has the unknown status %d", m.of, m.status)
		}
	}
}
