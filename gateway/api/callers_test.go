package api

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"headcount/gateway/identity"
)

func TestIdentityProblems(t *testing.T) {
	for name, tc := range map[string]struct {
		err    error
		status int
		header string
		want   string
	}{
		"none": {identity.ErrNoToken, 401, "WWW-Authenticate", `Bearer realm="headcount"`},
		"bad":  {fmt.Errorf("%w: it is expired", identity.ErrBadToken), 401, "WWW-Authenticate", `Bearer realm="headcount", error="invalid_token"`},
		"away": {identity.ErrKeysAway, 503, "Retry-After", "5"},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			RefuseIdentity(w, tc.err)
			if got := w.Header().Get(tc.header); w.Code != tc.status || got != tc.want || !strings.Contains(w.Body.String(), tc.err.Error()) {
				t.Fatalf("%d, %s: %s; %s", w.Code, tc.header, got, w.Body)
			}
		})
	}
}
