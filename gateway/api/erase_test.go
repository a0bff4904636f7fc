package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"headcount/gateway/bounds"
	"headcount/presence"
)

// One address may not have visitors erased without end. A server may.
func TestErasuresOfAnAddressAreLimited(t *testing.T) {
	h, identities := serve(t, []string{"key"}, Config{})
	known, err := identities.Identify(httptest.NewRequest(http.MethodGet, "/", nil), presence.DefaultSite, false)
	if err != nil {
		t.Fatal(err)
	}

	for range 2 * bounds.Erasures.Burst { // nothing is kept of who was never here
		call(t, h, http.StatusNoContent, http.MethodDelete, "/-/me")
	}

	left := 100 * bounds.Erasures.Burst // beyond what may come back while a busy machine makes them
	for ; left > 0; left-- {
		r := httptest.NewRequest(http.MethodDelete, "/-/me", nil)
		r.Header.Set("Headcount-Id", known.Signed)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code == http.StatusTooManyRequests {
			if w.Header().Get("Retry-After") != "1" {
				t.Errorf("Retry-After is %q", w.Header().Get("Retry-After"))
			}
			break
		}
		if w.Code != http.StatusNoContent {
			t.Fatal(w.Code)
		}
	}

	if left == 0 {
		t.Error("one address may erase as often as it likes")
	}

	for range 2 * bounds.Erasures.Burst {
		call(t, h, http.StatusNoContent, http.MethodDelete, "/-/users/ann", "X-API-Key", "key")
	}
}

// Few erasures of visitors look at sets at a time, and only one of an address, which thus leaves room for
// others. Those of servers wait only for each other.
func TestErasuresWaitForTheirTurn(t *testing.T) {
	e := newErasures()
	ended, cancel := context.WithCancel(t.Context())
	cancel()

	slot := func(n int) *bounds.Slot {
		s, ok := e.addresses.Enter(netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		if !ok {
			t.Fatal("no slot")
		}
		return s
	}

	for _, of := range []func(n int) *bounds.Slot{slot, func(int) *bounds.Slot { return nil }} {
		var end func()
		var err error
		for n := range bounds.ErasuresAtOnce.Max {
			end, err = e.turn(t.Context(), of(n))
			if err != nil {
				t.Fatal(err)
			}

			if _, err := e.turn(ended, slot(n)); err == nil {
				t.Error("an address has two at once")
			}
		}

		if _, err := e.turn(ended, of(bounds.ErasuresAtOnce.Max)); err == nil {
			t.Error("there are more at once than may be")
		}

		end()
		if _, err := e.turn(t.Context(), of(bounds.ErasuresAtOnce.Max)); err != nil {
			t.Error(err)
		}
	}
}
