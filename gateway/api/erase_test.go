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

// Visitors of one address can be erased only at a limited rate. Servers have no such limit.
func TestErasuresOfAnAddressAreLimited(t *testing.T) {
	h, identities := serve(t, []string{"key"}, Config{})
	known, err := identities.Identify(httptest.NewRequest(http.MethodGet, "/", nil), presence.DefaultSite, false)
	if err != nil {
		t.Fatal(err)
	}

	for range 2 * bounds.Erasures.Burst { // erasures of users who were never here cost nothing
		call(t, h, http.StatusNoContent, http.MethodDelete, "/-/me")
	}

	left := 100 * bounds.Erasures.Burst // more than what may come back while a busy machine makes them
	for ; left > 0; left-- {
		r := httptest.NewRequest(http.MethodDelete, "/-/me", nil)
		r.Header.Set("Headcount-Id", known.Signed)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code == http.StatusTooManyRequests {
			if w.Header().Get("Retry-After") != "1" {
				t.Errorf("Retry-After is %q, want 1 s", w.Header().Get("Retry-After"))
			}
			break
		}
		if w.Code != http.StatusNoContent {
			t.Fatalf("the erasure is answered %d, want 204", w.Code)
		}
	}

	if left == 0 {
		t.Error("the erasures of one address are not limited")
	}

	for range 2 * bounds.Erasures.Burst {
		call(t, h, http.StatusNoContent, http.MethodDelete, "/-/users/ann", "X-API-Key", "key")
	}
}

// Only few erasures of visitors run at a time, and only one of each address, so that others have room. Those of servers
// wait only for each other.
func TestErasuresWaitForTheirTurn(t *testing.T) {
	e := newErasures()
	ended, cancel := context.WithCancel(t.Context())
	cancel()

	slot := func(n int) *bounds.Slot {
		s, ok := e.addresses.Enter(netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}))
		if !ok {
			t.Fatal("the address got no slot")
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
				t.Error("two erasures of one address run at once")
			}
		}

		if _, err := e.turn(ended, of(bounds.ErasuresAtOnce.Max)); err == nil {
			t.Error("more erasures run at once than permitted")
		}

		end()
		if _, err := e.turn(t.Context(), of(bounds.ErasuresAtOnce.Max)); err != nil {
			t.Error(err)
		}
	}
}
