package routed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/outage"
	"headcount/internal/postgres"
	"headcount/internal/rows"
	"headcount/internal/rows/rowspg"
	"headcount/internal/rows/rowstier"
)

// Export is what an export of PostgreSQL reads, alone or with the Redis in front of it. It changes nothing, so servers
// may be using them.
type Export struct {
	owned *owner.Reader
	exact *exactpg.Store
	back  *rowspg.Store
	tier  *rowstier.Store // nil: PostgreSQL alone
}

var _ counter.Dumper = (*Export)(nil)

// OpenExport opens the counters in the database of that URL, and in the rows of the Redis in front of it; nil: what
// PostgreSQL has is all. It fails, with postgres.ErrConfig, if the database cannot be used.
func OpenExport(ctx context.Context, url string, front rows.Store) (*Export, error) {
	back, err := rowspg.Open(ctx, rowspg.Config{
		URL: url, Back: true, ReadOnly: true, Beside: []postgres.Tables{exactpg.Tables()}, Log: zerolog.Nop(),
	})
	if err != nil {
		return nil, fmt.Errorf("routed: %w", err)
	}

	e := &Export{back: back, exact: exactpg.New(exactpg.Config{DB: back.DB(), ReadOnly: true, Log: zerolog.Nop()})}
	store := rows.Store(back)
	if front != nil {
		e.tier = rowstier.New(front, back, rowstier.Config{Log: zerolog.Nop()})
		store = e.tier
	}
	e.owned = owner.NewReader(store, rows.PartitionOf)

	return e, nil
}

// Dump implements counter.Dumper.
func (e *Export) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	return dumpBoth(ctx, e.owned, e.exact, after, each)
}

// Deleted implements counter.Dumper.
func (e *Export) Deleted(ctx context.Context) (uint64, error) {
	owned, err := e.owned.Deleted(ctx)
	if err != nil {
		return 0, err
	}
	exact, err := e.exact.Deleted(ctx)

	return max(owned, exact), err
}

// Close closes what OpenExport opened.
func (e *Export) Close() error {
	var err error
	if e.tier != nil {
		err = e.tier.Close(context.Background()) // it has nothing to drain
	}
	e.exact.Close()
	e.back.Close()

	return err
}

// Import is a store into which an export is read: PostgreSQL with a Redis in front of it. No server uses them meanwhile.
type Import struct {
	*Store
	owned  *call.Store
	behind *Behind
}

const (
	// importWithin is how long an import waits until what was there is in PostgreSQL, and persistWithin until what it read
	// is.
	importWithin  = 10 * time.Minute
	persistWithin = 10 * time.Minute
)

// OpenImport opens the counters in the database of that URL and in the rows of the Redis in front of it, and claims them.
func OpenImport(ctx context.Context, url string, front rows.Store, rules *counter.Rules) (*Import, error) {
	behind, err := OpenBehind(ctx, BehindConfig{URL: url, Rules: rules, Log: zerolog.Nop()})
	if err != nil {
		return nil, err
	}
	behind.Begin(front)

	// A server that starts in spite of that takes the claims, and the import ends.
	i := &Import{behind: behind}
	i.owned, err = call.NewLocal(ctx, behind.Rows(), rules, owner.Config{Name: "import " + rand.Text(), ExactOutside: true})
	if err != nil {
		return nil, errors.Join(err, behind.Close(ctx))
	}
	i.Store = behind.Over(i.owned)

	within, cancel := context.WithTimeout(ctx, importWithin)
	defer cancel()
	for behind.Ready() != nil {
		if !outage.Sleep(within, adoptedEvery) {
			return nil, errors.Join(behind.Ready(), i.Close())
		}
	}

	return i, nil
}

// Close implements counter.Store. It waits until PostgreSQL has everything.
func (i *Import) Close() error {
	err := i.owned.Close()
	ctx, cancel := context.WithTimeout(context.Background(), persistWithin)
	defer cancel()

	return errors.Join(err, i.behind.Close(ctx))
}
