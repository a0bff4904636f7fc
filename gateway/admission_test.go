package gateway

import (
	"net/http"
	"sync/atomic"
	"testing"
)

type scarce struct{ atomic.Bool }

func (s *scarce) High() bool { return s.Load() }

// While memory is short no new client is accepted, and connected clients stay.
func TestMemoryIsShort(t *testing.T) {
	memory := &scarce{}
	inMemory(t, func(cfg *Config) { cfg.Memory = memory }, func(t *testing.T, s *served) {
		first := s.socket("")

		memory.Store(true)
		for range 3 {
			resp := s.open("/p/counter/events", "").response(http.StatusServiceUnavailable)
			if resp.Header.Get("Retry-After") == "" {
				t.Fatalf("the refusal has no Retry-After: %v", resp.Header)
			}
		}

		// Calls are served: they hold no memory once they are answered.
		s.open("/p/counter", "", "Connection: close").response(http.StatusOK)
		s.settles(1)

		memory.Store(false)
		_ = s.socket("").Close()
		_ = first.Close()
		s.settles(0)
	})
}
