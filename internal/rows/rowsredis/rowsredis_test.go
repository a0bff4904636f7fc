package rowsredis_test

import (
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/rows/rowstest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// open returns a store in the Redis at the URL. It is closed when the test ends.
func open(t testing.TB, url string) *rowsredis.Store {
	t.Helper()
	s := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, url)})
	t.Cleanup(s.Close)

	return s
}

// TestServerContractOfRows: the contract holds over TLS, as the user that deploy/redis.acl documents.
func TestServerContractOfRows(t *testing.T) {
	server := redistest.StartSecure(t)
	s := open(t, server.URL())
	rowstest.Run(t, func(t *testing.T) rows.Store {
		server.Flush(t)
		return s
	})

	if denied := server.Denied(t); len(denied) > 0 {
		t.Errorf("deploy/redis.acl does not permit: %q", denied)
	}
}
