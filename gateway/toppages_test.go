package gateway

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestAQuietListHasComments: a stream whose list does not change has comments often enough for <live-top>, which takes
// a minute of silence for a broken connection. The stream of a page has a comment at every ping.
func TestAQuietListHasComments(t *testing.T) {
	tuned := func(t *testing.T) func(*Config) {
		all := everything(t)
		return func(cfg *Config) {
			all(cfg)
			cfg.PingInterval = 10 * time.Minute
		}
	}

	inMemoryWith(t, tuned, func(t *testing.T, s *served) {
		comments := func(path string) (within time.Duration) {
			r := s.open(path, "", "X-API-Key: k")
			lines := bufio.NewReader(r.response(http.StatusOK).Body)
			// In a bubble time passes as soon as all goroutines wait, so an hour costs nothing.
			_ = r.SetReadDeadline(time.Now().Add(time.Hour))

			began := time.Now()
			for {
				line, err := lines.ReadString('\n')
				if err != nil {
					t.Fatalf("%s: %v", path, err)
				}

				if strings.HasPrefix(line, ":") {
					_ = r.Close()
					return time.Since(began)
				}
			}
		}

		if within := comments("/-/top/events"); within > 50*time.Second {
			t.Errorf("the list has its first comment after %s, want 50s at most", within)
		}
		// The setting of ten minutes still holds for other streams.
		if within := comments("/p/counter/events"); within < 5*time.Minute {
			t.Errorf("the stream of a page has its first comment after %s, want 5m at least", within)
		}
	})
}
