// Package dump has the commands that write the counters of a store into a file, and put those of a file into a store.
package dump

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"headcount/counter"
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

// Export is the command line of an export.
type Export struct {
	place
	Site   string `env:"-" type:"text" placeholder:"NAME" help:"Export the counters of this site alone. Without it the export has all sites."`
	File   string `type:"text" placeholder:"FILE" help:"Where the export is written. Only its owner can read the file. Without it the export goes to standard output."`
	Resume bool   `help:"Continue the file of an interrupted export."`
}

// Import is the command line of an import.
type Import struct {
	place
	Site     string `env:"-" type:"text" placeholder:"NAME" help:"Import into this site. Without it each counter goes to the site that it was exported from."`
	File     string `type:"text" placeholder:"FILE" help:"The file of an export. Without it the export is read from standard input."`
	Counters string `type:"text" placeholder:"FILE" help:"The file of rules, as for serve. They say how long ledgers and time buckets are kept."`
}

// stores returns where the counters are. It refuses settings that cannot work.
func (p *place) stores() (*transfer.Place, error) {
	if err := p.check(); err != nil {
		return nil, err
	}

	return &transfer.Place{Dir: p.DataDir, Redis: p.Redis, Postgres: p.Postgres, Regions: p.Regions}, nil
}

// check refuses settings that cannot work.
func (p *place) check() error {
	// Without both the export would silently lack a part of the counters.
	if p.Regions && (p.Redis == "" || p.Postgres == "") {
		return setting.Errorf("regions", "it says what is in Redis and what in PostgreSQL; give --redis and --postgres")
	}
	if p.Postgres != "" {
		if problem := postgres.CheckURL(p.Postgres); problem != "" {
			return setting.Errorf("postgres", "%s", problem)
		}
	}
	if p.Redis == "" && p.Postgres == "" && p.DataDir == "" {
		return setting.Errorf("data-dir", "no store is named; give --data-dir, --postgres or --redis "+
			"(counters in memory end with their process)")
	}
	if p.Redis == "" {
		return nil
	}

	if problem := redisconn.CheckURL(p.Redis); problem != "" {
		return setting.Errorf("redis", "%s", problem)
	}
	if p.DataDir != "" {
		return setting.Errorf("data-dir", "with --redis counters are not in a file; leave one of the two out")
	}

	return nil
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
	t.counters = counters
	t.restored = restored
	t.bytes = bytes
	// Transferred is called for each batch, which may be many in a second.
	if time.Since(t.last) >= time.Second {
		t.last = time.Now()
		t.print("so far")
	}
}

func (t *progress) print(how string) {
	line := fmt.Sprintf("headcount: %d counters %s %s, %.1f MB", t.counters, t.verb, how, float64(t.bytes)/1e6)
	// An import may be repeated; what it finds done already must not look like a loss.
	if t.restored < t.counters && t.restores {
		line += fmt.Sprintf("; %d were there already", t.counters-t.restored)
	}
	fmt.Fprintln(t.to, line)
}

// Run writes the export.
func (c *Export) Run(ctx context.Context, stdout, stderr io.Writer) error {
	if c.Resume && c.File == "" {
		return setting.Errorf("resume", "there is no file to continue; give --file")
	}
	site, err := parseSite(c.Site)
	if err != nil {
		return err
	}

	stores, err := c.stores()
	if err != nil {
		return err
	}
	// Opened before the file is created, so that a wrong URL leaves no empty file behind.
	store, err := stores.OpenSource(ctx)
	if err != nil {
		return err
	}
	defer store.Close()
	counters := counter.Dumper(store)
	if site != nil {
		counters = transfer.Of(*site, store)
	}

	report := &progress{to: stderr, verb: "exported", last: time.Now()}
	if c.File != "" {
		return c.exportFile(ctx, counters, report)
	}
	if err := transfer.Export(ctx, stdout, counters, transfer.Position{}, report); err != nil {
		return fmt.Errorf("export: %w", err)
	}
	report.print("in all")

	return nil
}

// exportFile writes the export to the file.
func (c *Export) exportFile(ctx context.Context, counters counter.Dumper, report *progress) error {
	file, at, err := c.openFile()
	if err != nil {
		return err
	}
	defer file.Close()
	// A script may repeat its call with --resume until it succeeds.
	if at.Whole {
		fmt.Fprintf(report.to, "headcount: %s is whole already\n", c.File)
		return nil
	}

	err = transfer.Export(ctx, file, counters, at, report)
	if err == nil {
		// An export often precedes the deletion of what it was made of.
		err = file.Sync()
	}
	if err != nil {
		return fmt.Errorf("export: %w", err)
	}
	report.print("in all")

	return nil
}

// parseSite returns the site with that name; nil: none is named.
func parseSite(name string) (*presence.Site, error) {
	if name == "" {
		return nil, nil
	}

	site, err := presence.ParseSite(name)
	if err != nil {
		return nil, setting.Errorf("site", "%v", err)
	}

	return &site, nil
}

// openFile creates the file or, with --resume, opens it at the end of its complete part.
func (c *Export) openFile() (*os.File, transfer.Position, error) {
	if c.Resume {
		return c.resumeFile()
	}

	// O_EXCL, because an older export may be the only copy; the mode, because keys of counters may name users.
	file, err := os.OpenFile(c.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, os.ErrExist) {
		err = fmt.Errorf("--file: %s exists already; continue it (--resume), or name another file", c.File)
	}

	return file, transfer.Position{}, err
}

func (c *Export) resumeFile() (*os.File, transfer.Position, error) {
	file, err := os.OpenFile(c.File, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, transfer.Position{}, fmt.Errorf("--file: %w", err)
	}

	at, err := transfer.Resume(file)
	// The last line may have been written in part.
	if err == nil && !at.Whole {
		err = cut(file, at.Offset)
	}
	if err != nil {
		_ = file.Close()
		return nil, at, fmt.Errorf("--file: %s: %w", c.File, err)
	}

	return file, at, nil
}

// cut removes what follows an offset, and has the next write go there.
func cut(file *os.File, offset int64) error {
	if err := file.Truncate(offset); err != nil {
		return err
	}
	_, err := file.Seek(offset, io.SeekStart)

	return err
}

// Run reads an export into a store whose counters have those rules.
func (c *Import) Run(ctx context.Context, rules *counter.Rules, stdin io.Reader, stderr io.Writer) error {
	into, err := parseSite(c.Site)
	if err != nil {
		return err
	}

	in := stdin
	name := "standard input"
	// Opened before the store, so that a wrong name leaves the store alone.
	if c.File != "" {
		file, err := os.Open(c.File)
		if err != nil {
			return fmt.Errorf("--file: %w", err)
		}
		defer file.Close()
		in = file
		name = c.File
	}

	stores, err := c.stores()
	if err != nil {
		return err
	}
	store, err := stores.OpenTarget(ctx, rules)
	if err != nil {
		return err
	}
	defer store.Close()

	report := &progress{to: stderr, verb: "imported", restores: true, last: time.Now()}
	err = transfer.Import(ctx, in, store, rules, into, report)
	if err == nil {
		// Only a complete import marks the store as one that a server may use.
		err = store.Complete(ctx)
	}
	if err != nil {
		return fmt.Errorf("import: %s: %w", name, err)
	}
	report.print("in all")

	return nil
}
