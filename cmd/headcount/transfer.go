package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/local"
	"headcount/counter/routed"
	"headcount/counter/transfer"
	"headcount/internal/postgres"
	"headcount/internal/redisconn"
	"headcount/internal/setting"
	"headcount/presence"
)

// place names a store of counters as serve does.
type place struct {
	DataDir  string `type:"text" placeholder:"DIR" help:"The data directory of the server. The server must not be running."`
	Postgres string `type:"text" placeholder:"URL" help:"The URL of PostgreSQL."`
	Redis    string `type:"text" placeholder:"URL" help:"The URL of Redis; give --postgres too if the server uses it behind Redis. For an import no server may be using it."`
	Regions  bool   `help:"The Redis is a region's of several: exact counters are in PostgreSQL, which the regions share, and all others in Redis."`
}

type exportCommand struct {
	place
	Site   string `env:"-" type:"text" placeholder:"NAME" help:"Export the counters of this site alone. Without it the export has all sites."`
	File   string `type:"text" placeholder:"FILE" help:"Where the export is written. Only its owner can read the file. Without it the export goes to standard output."`
	Resume bool   `help:"Continue the file of an interrupted export."`
}

type importCommand struct {
	place
	Site     string `env:"-" type:"text" placeholder:"NAME" help:"Import into this site. Without it each counter goes to the site that it was exported from."`
	File     string `type:"text" placeholder:"FILE" help:"The file of an export. Without it the export is read from standard input."`
	Counters string `type:"text" placeholder:"FILE" help:"The file of rules, as for serve. They say which counters are exact, and how long ledgers and time buckets are kept."`
}

// counterStore is a store whose counters can be exported and imported.
type counterStore interface {
	counter.Store
	counter.Dumper
	counter.Restorer
}

// completer is a counterStore that has to know when an import is whole.
type completer interface {
	Complete(ctx context.Context) error
}

// connectedStore closes its connection, too.
type connectedStore struct {
	*cluster.Sole
	conn *redisconn.Conn
}

// Close is as counter.Store says.
func (s *connectedStore) Close() error { return errors.Join(s.Sole.Close(), s.conn.Close()) }

// open opens the store. fresh permits that the store is created; the rules then say which counters are exact.
func (p place) open(ctx context.Context, fresh bool, rules *counter.Rules) (counterStore, error) {
	if p.Regions && (p.Redis == "" || p.Postgres == "") {
		return nil, setting.Errorf("regions", "it says what is in Redis and what in PostgreSQL; give --redis and --postgres")
	}
	if p.Postgres != "" {
		if problem := postgres.CheckURL(p.Postgres); problem != "" {
			return nil, setting.Errorf("postgres", "%s", problem)
		}
	}
	switch {
	case p.Redis != "" && p.Postgres != "" && !p.Regions:
		return p.openBehindImport(ctx, rules)
	case p.Redis != "":
		return p.openRedis(ctx, fresh, rules)
	case p.Postgres != "":
		s, err := routed.OpenAlone(ctx, routed.AloneConfig{URL: p.Postgres, Rules: rules, Log: zerolog.Nop()})
		if err != nil {
			return nil, refusedPostgres(err)
		}
		return s, nil
	case p.DataDir != "":
		s, err := local.Open(ctx, p.DataDir, rules, zerolog.Nop())
		if err != nil {
			return nil, fmt.Errorf("--data-dir: %w", err)
		}
		return s, nil
	}
	return nil, setting.Errorf("data-dir", "no store is named; give --data-dir, --postgres or --redis (counters in memory end with their process)")
}

// dump is a store whose counters can be exported.
type dump interface {
	counter.Dumper
	Close() error
}

// openDump opens the store for an export.
func (p place) openDump(ctx context.Context) (dump, error) {
	if p.Postgres != "" && !p.Regions {
		return p.openPostgresDump(ctx)
	}
	if p.Redis != "" && p.Postgres == "" && !p.Regions {
		conn, err := p.dial(ctx)
		if err != nil {
			return nil, err
		}

		return &connectedExport{cluster.OpenExport(conn), conn}, nil
	}
	if p.DataDir == "" || p.Redis != "" || p.Postgres != "" {
		return p.open(ctx, false, counter.BuiltinRules())
	}

	// Nothing is made, and a disk that is full can be read.
	path := filepath.Join(p.DataDir, local.File)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("--data-dir: there is no %s, so there are no counters to export", path)
	}
	from, err := local.OpenDump(p.DataDir)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}

	return from, nil
}

// openRedis opens a store in Redis alone, or that of a region.
func (p place) openRedis(ctx context.Context, fresh bool, rules *counter.Rules) (counterStore, error) {
	conn, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	if !p.Regions {
		return openImport(ctx, conn, rules)
	}

	store, err := openRegion(ctx, conn, cluster.SoleConfig{Postgres: p.Postgres, Rules: rules, Imports: fresh})
	if err != nil {
		_ = conn.Close()
		return nil, refusedPostgres(err)
	}
	connected := &connectedStore{store, conn}
	running, err := leases(ctx, connected)
	if err == nil && fresh && len(running) > 0 {
		slices.Sort(running)
		err = fmt.Errorf("--redis: it is in use by other processes (%s); end them first", strings.Join(running, ", "))
	}
	if err == nil && fresh {
		err = store.Own(ctx)
	}
	if err != nil {
		_ = connected.Close()
		return nil, err
	}

	return connected, nil
}

// openRegion opens the counters of a region, whose exact ones are in PostgreSQL.
func openRegion(ctx context.Context, conn *redisconn.Conn, cfg cluster.SoleConfig) (*cluster.Sole, error) {
	cfg.Redis = conn
	cfg.Log = zerolog.Nop()
	opened, err := cluster.OpenSole(ctx, cfg)
	if err != nil {
		return nil, err
	}

	return opened, nil
}

// leases returns the processes that use the Redis of a store. It waits for Redis to answer.
func leases(ctx context.Context, store *connectedStore) (running []string, err error) {
	for end := time.Now().Add(dialled); ; time.Sleep(100 * time.Millisecond) {
		running, err = store.Leases(ctx)
		var other *counter.FormatError
		refused := errors.As(err, &other)
		if err == nil || refused || time.Now().After(end) || ctx.Err() != nil {
			return running, err
		}
	}
}

// dial opens a connection to Redis, and waits until it answers.
func (p place) dial(ctx context.Context) (*redisconn.Conn, error) {
	if problem := redisconn.CheckURL(p.Redis); problem != "" {
		return nil, setting.Errorf("redis", "%s", problem)
	}
	if p.DataDir != "" {
		return nil, setting.Errorf("data-dir", "with --redis counters are not in a file; leave one of the two out")
	}
	conn, err := redisconn.Open(redisconn.Config{URL: p.Redis, Log: zerolog.Nop()})
	if err != nil {
		return nil, fmt.Errorf("--redis: %w", err)
	}

	caller := conn.Caller(redisconn.CallerConfig{Unavailable: counter.ErrUnavailable})
	defer caller.Close()
	for until := time.Now().Add(dialled); ; time.Sleep(100 * time.Millisecond) {
		_, err := caller.Known(ctx)
		if err == nil {
			return conn, nil
		}
		if time.Now().After(until) || ctx.Err() != nil {
			_ = conn.Close()
			return nil, fmt.Errorf("--redis: %w", err)
		}
	}
}

// connectedExport is the counters in a Redis alone, with their connection.
type connectedExport struct {
	*cluster.Export
	conn *redisconn.Conn
}

// Close is as dump says.
func (d *connectedExport) Close() error { return errors.Join(d.Export.Close(), d.conn.Close()) }

// connectedImport is a counterStore in a Redis alone, with its connection.
type connectedImport struct {
	*cluster.Import
	conn *redisconn.Conn
}

// Close is as counter.Store says.
func (i *connectedImport) Close() error { return errors.Join(i.Import.Close(), i.conn.Close()) }

// openImport opens a store in Redis alone.
func openImport(ctx context.Context, conn *redisconn.Conn, rules *counter.Rules) (counterStore, error) {
	store, err := cluster.OpenImport(ctx, conn, rules)
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("--redis: %w", err)
	}

	return &connectedImport{store, conn}, nil
}

// dialled is how long it may take until Redis answers.
const dialled = 3 * time.Second

// refusedPostgres turns an error about the configuration of the database into an error about --postgres.
func refusedPostgres(err error) error {
	if errors.Is(err, postgres.ErrConfig) {
		_, problem, _ := strings.Cut(err.Error(), postgres.ErrConfig.Error()+": ")
		return setting.Errorf("postgres", "%s", problem)
	}
	return err
}

// progress writes the progress of a transfer, at most once a second and at the end.
type progress struct {
	to       io.Writer
	verb     string // "exported"
	restores bool
	last     time.Time

	counters, restored int
	bytes              int64
}

// Transferred implements transfer.Progress.
func (t *progress) Transferred(counters, restored int, bytes int64) {
	t.counters, t.restored, t.bytes = counters, restored, bytes
	if now := time.Now(); now.Sub(t.last) >= time.Second {
		t.last = now
		t.print("so far")
	}
}

func (t *progress) print(how string) {
	line := fmt.Sprintf("headcount: %d counters %s %s, %.1f MB", t.counters, t.verb, how, float64(t.bytes)/1e6)
	if t.restored < t.counters && t.restores {
		line += fmt.Sprintf("; %d were there already", t.counters-t.restored)
	}
	fmt.Fprintln(t.to, line)
}

// run writes the export.
func (c *exportCommand) run(ctx context.Context, stdout, stderr io.Writer) (err error) {
	if c.Resume && c.File == "" {
		return setting.Errorf("resume", "there is no file to continue; give --file")
	}
	var from presence.Site
	if c.Site != "" {
		if from, err = presence.ParseSite(c.Site); err != nil {
			return setting.Errorf("site", "%v", err)
		}
	}
	store, err := c.openDump(ctx)
	if err != nil {
		return err
	}
	defer store.Close()
	counters := counter.Dumper(store)
	if c.Site != "" {
		counters = transfer.Of(from, store)
	}
	out, position := stdout, transfer.Position{}
	if c.File != "" {
		file, at, err := c.openFile()
		if err != nil {
			return err
		}
		defer file.Close()
		if position = at; position.Whole {
			fmt.Fprintf(stderr, "headcount: %s is whole already\n", c.File)
			return nil
		}
		out = file
	}
	report := &progress{to: stderr, verb: "exported", last: time.Now()}
	if err := transfer.Export(ctx, out, counters, position, report); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	if file, ok := out.(*os.File); ok && c.File != "" {
		if err := file.Sync(); err != nil {
			return fmt.Errorf("export: %w", err)
		}
	}
	report.print("in all")
	return nil
}

// openFile creates the file or, with --resume, opens it at the end of its complete part.
func (c *exportCommand) openFile() (file *os.File, at transfer.Position, err error) {
	if !c.Resume {
		file, err = os.OpenFile(c.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, os.ErrExist) {
			err = fmt.Errorf("--file: %s exists already; continue it (--resume), or name another file", c.File)
		}
		return file, at, err
	}
	if file, err = os.OpenFile(c.File, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, at, fmt.Errorf("--file: %w", err)
	}
	if at, err = transfer.Resume(file); err == nil && !at.Whole {
		if err = file.Truncate(at.Offset); err == nil {
			_, err = file.Seek(at.Offset, io.SeekStart)
		}
	}
	if err != nil {
		_ = file.Close()
		return nil, at, fmt.Errorf("--file: %s: %w", c.File, err)
	}
	return file, at, nil
}

// run reads an export.
func (c *importCommand) run(ctx context.Context, stdin io.Reader, stderr io.Writer) error {
	rules, err := readRules(c.Counters)
	if err != nil {
		return err
	}
	var into *presence.Site
	if c.Site != "" {
		site, err := presence.ParseSite(c.Site)
		if err != nil {
			return setting.Errorf("site", "%v", err)
		}
		into = &site
	}
	in, name := stdin, "standard input"
	if c.File != "" {
		file, err := os.Open(c.File)
		if err != nil {
			return fmt.Errorf("--file: %w", err)
		}
		defer file.Close()
		in, name = file, c.File
	}
	store, err := c.open(ctx, true, rules)
	if err != nil {
		return err
	}
	defer store.Close()
	report := &progress{to: stderr, verb: "imported", restores: true, last: time.Now()}
	if err := transfer.Import(ctx, in, store, rules, into, report); err != nil {
		return fmt.Errorf("import: %s: %w", name, err)
	}
	if whole, ok := store.(completer); ok {
		if err := whole.Complete(ctx); err != nil {
			return fmt.Errorf("import: %s: %w", name, err)
		}
	}
	report.print("in all")
	return nil
}
