package counterpg

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// poolerProbes is how many connections refusePooler compares. When the address stands for fewer poolers than that, two
// of them lead to the same one.
const poolerProbes = 4

// refusePooler fails, with ErrConfig, when a pooler answers that gives each transaction of a connection another backend, as
// PgBouncer does in its modes transaction and statement. There a session has no settings, locks and prepared statements
// of its own, and receives no notifications. It sets nothing: a setting would stay with other clients of that pooler.
func refusePooler(ctx context.Context, cc *pgx.ConnConfig) error {
	config := cc.Config.Copy()
	config.AfterConnect = nil
	var backends []string // one for each connection, which is open until the end
	for range poolerProbes {
		c, err := pgconn.ConnectConfig(ctx, config)
		if err != nil {
			return err
		}
		defer c.Close(context.WithoutCancel(ctx))
		first, again, err := backendsOf(ctx, c)
		switch {
		case err != nil && len(backends) > 0:
			return fmt.Errorf("a connection pooler answers, and gives %d connections at once (PgBouncer's default_pool_size): %w", len(backends), err)
		case err != nil:
			return err
		case first == strconv.FormatUint(uint64(c.PID()), 10): // a pooler makes up the PID of a connection
			return nil
		case first != again || slices.Contains(backends, first):
			return fmt.Errorf("%w: a connection pooler answers that shares connections to PostgreSQL between its clients, as PgBouncer does with pool_mode transaction or statement; "+
				"give the address of PostgreSQL itself, or set pool_mode = session", ErrConfig)
		}
		backends = append(backends, first)
	}
	return nil
}

// backendsOf returns the PIDs of the processes that serve two transactions of c. These are simple queries, since a prepared
// statement would stay with its process.
func backendsOf(ctx context.Context, c *pgconn.PgConn) (first, again string, err error) {
	for _, pid := range []*string{&first, &again} {
		results, err := c.Exec(ctx, "select pg_backend_pid()").ReadAll()
		if err != nil {
			return "", "", err
		}
		*pid = string(results[0].Rows[0][0])
	}
	return first, again, nil
}
