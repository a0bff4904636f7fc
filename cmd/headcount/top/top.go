// Package top is the dashboard in a terminal. It asks a server for the data of its dashboard,
// once in an interval, and writes them over those before. Scripts take one answer with --once.
package top

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"headcount/client"
)

const patience = 5 * time.Second // for one answer

// ErrSettings is in errors about flags.
var ErrSettings = errors.New("bad setting")

// Command is `headcount top`.
type Command struct {
	URL      string        `name:"url" type:"text" placeholder:"URL" default:"http://127.0.0.1:8080" help:"A gateway of the cluster; any of them knows all."`
	APIKeys  []string      `name:"api-key" type:"each" placeholder:"KEY" help:"A key of the server, if it has any. Give it in the environment: everyone may read command lines."`
	Site     string        `name:"site" env:"-" type:"text" placeholder:"NAME" help:"The site whose pages are shown; without it the first one of the server."`
	Interval time.Duration `type:"span" placeholder:"TIME" default:"1s" help:"The time between two answers. The server has a new one once a second."`
	Once     bool          `help:"Print one answer, and end."`
	JSON     bool          `name:"json" help:"With --once: print the answer as JSON."`
}

// Run shows the dashboard until ctx ends. Where out is no terminal it writes one answer.
func (c *Command) Run(ctx context.Context, out io.Writer) error {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("--url: %w: it is not an http or https URL; write the address of a gateway", ErrSettings)
	}
	cfg := client.Config{URL: c.URL, Site: c.Site}
	if len(c.APIKeys) > 0 {
		cfg.APIKey = c.APIKeys[0]
	}
	api := client.NewAPI(cfg)
	if c.JSON && !c.Once {
		return fmt.Errorf("--json: %w: it needs --once", ErrSettings)
	}
	file, isFile := out.(*os.File)
	if c.Once || !isFile || !term.IsTerminal(int(file.Fd())) {
		body, d, err := ask(ctx, api)
		if err != nil {
			return err
		}
		body = append(body, '\n')
		if !c.JSON {
			body = []byte(screen{now: d}.text(0, 0))
		}
		_, err = out.Write(body)
		return err
	}
	return watch(ctx, api, c.Interval, out, func() (width, height int) {
		width, height, _ = term.GetSize(int(file.Fd())) // 0 and 0: not known, and nothing is cut off
		return width, height
	})
}

// What commands a terminal: to the first column of the first line, and to erase from there to the end of the line or of
// the screen.
const (
	home      = "\x1b[H"
	restLine  = "\x1b[K\n"
	restBelow = "\x1b[J"
)

// watch writes the screen over the one before, each interval, until ctx ends. While the server does not answer it shows
// the last answer, and why.
func watch(ctx context.Context, api *client.API, interval time.Duration, out io.Writer, size func() (width, height int)) error {
	next := time.NewTicker(interval)
	defer next.Stop()
	for s := (screen{}); ; {
		width, height := size()
		// No line takes the last column, since erasing behind that erases it, and the last line is not ended, which would scroll.
		text := strings.TrimSuffix(s.text(max(width-1, min(width, 1)), height), "\n")
		text = home + strings.ReplaceAll(text, "\n", restLine) + restBelow
		if _, err := io.WriteString(out, text); err != nil {
			return err
		}
		_, d, err := ask(ctx, api)
		if s.err = err; err == nil {
			s.before, s.now = s.now, d
		}
		select {
		case <-ctx.Done():
			_, err := io.WriteString(out, "\n")
			return err
		case <-next.C:
		}
	}
}

// ask returns an answer as it came, without the new line, and as data.
func ask(ctx context.Context, api *client.API) (body json.RawMessage, d *data, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err = api.Do(ctx, http.MethodGet, "/-/dashboard/data", nil, &body)
	if err == nil {
		err = json.Unmarshal(body, &d)
	}
	no := (*client.Error)(nil)
	switch {
	case err == nil:
		return body, d, nil
	case body != nil, errors.Is(err, client.ErrFrame):
		err = fmt.Errorf("this is no dashboard: %w", err)
	case !errors.As(err, &no):
		err = fmt.Errorf("the server does not answer: %w", err)
	case no.Status == http.StatusUnauthorized:
		err = errors.New("the server asks for an API key, and has not got the right one; give --api-key")
	case no.Status == http.StatusForbidden:
		err = errors.New("the server's key holds for another site; give --site")
	default:
		err = fmt.Errorf("the server answers %d %s", no.Status, http.StatusText(no.Status))
	}
	return nil, nil, err
}
