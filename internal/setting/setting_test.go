package setting

import (
	"errors"
	"testing"
)

func TestAddresses(t *testing.T) {
	for address, want := range map[string]struct {
		host               string
		port               int
		wildcard, loopback bool
	}{
		":8080":               {"", 8080, true, false},
		"0.0.0.0:1":           {"0.0.0.0", 1, true, false},
		"[::]:1":              {"::", 1, true, false},
		"127.0.0.1:0":         {"127.0.0.1", 0, false, true},
		"[::1]:65535":         {"::1", 65535, false, true},
		"[::ffff:127.0.0.1]:": {},
		"localhost:1":         {"localhost", 1, false, true},
		"node-1.example:7946": {"node-1.example", 7946, false, false},
		"a b:1":               {},
		"node-1":              {},
		":65536":              {},
		":http":               {},
	} {
		host, port, err := SplitAddress(address)
		if bad := want == (struct {
			host               string
			port               int
			wildcard, loopback bool
		}{}); bad {
			if err == nil {
				t.Errorf("%q is accepted as %q, %d", address, host, port)
			}

			continue
		}
		if err != nil || host != want.host || port != want.port || IsWildcard(address) != want.wildcard ||
			IsLoopback(address) != want.loopback {
			t.Errorf("%q: %q, %d, %v, wildcard %t, loopback %t",
				address, host, port, err, IsWildcard(address), IsLoopback(address))
		}
	}
}

func TestRefuse(t *testing.T) {
	err := Errorf("leave-grace", "%s is negative; give 0 or more", "-1s")
	var e *Error
	if !errors.As(err, &e) || e.Name != "leave-grace" ||
		err.Error() != "--leave-grace: -1s is negative; give 0 or more" {
		t.Errorf("got %v, want the flag, the fault and the remedy", err)
	}
}
