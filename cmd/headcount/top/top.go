// Package top shows the dashboard in a terminal. It requests the data of a server's dashboard
// at an interval and redraws the screen. With --once, for scripts, it prints one answer. It also
// explains a single count.
package top

import (
	"cmp"
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
	"headcount/internal/setting"
)

const timeout = 5 * time.Second // for one answer

// Command is `headcount top`.
type Command struct {
	URL      string        `name:"url" type:"text" placeholder:"URL" default:"http://127.0.0.1:8080" help:"Any gateway of the cluster."`
	APIKeys  []string      `name:"api-key" type:"each" placeholder:"KEY" help:"A key of the server, if it has any. Give it in the environment: everyone may read command lines."`
	Site     string        `name:"site" env:"-" type:"text" placeholder:"NAME" help:"The site whose pages are shown; without it the first one of the server."`
	Interval time.Duration `type:"span" placeholder:"TIME" default:"1s" help:"The time between two requests. The server has a new answer once a second."`
	Once     bool          `help:"Print one answer and exit."`
	JSON     bool          `name:"json" help:"With --once: print the answer as JSON."`
}

// Run shows the dashboard until ctx ends. If out is not a terminal, it writes one answer.
func (c *Command) Run(ctx context.Context, out io.Writer) error {
	if err := checkURL(c.URL); err != nil {
		return err
	}

	if c.JSON && !c.Once {
		return setting.Errorf("json", "it needs --once; give that, too")
	}

	api := client.NewAPI(client.Config{URL: c.URL, Site: c.Site, APIKey: keyOf(c.APIKeys, c.Site)})
	// A pipe gets one answer, because nobody would want control sequences in it.
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
		width, height, _ = term.GetSize(int(file.Fd())) // 0 and 0: unknown, so nothing is cut off
		return width, height
	})
}

// keyOf returns the key for a site. The environment may have the server's own setting, in which the name of a site and
// a colon stand in front of a key that is for that site alone.
func keyOf(keys []string, site string) string {
	for _, key := range keys {
		own, isOfSite := strings.CutPrefix(key, site+":")
		if isOfSite && site != "" {
			return own
		}
	}

	return cmp.Or(keys...)
}

func checkURL(text string) error {
	u, err := url.Parse(text)
	isHTTP := err == nil && (u.Scheme == "http" || u.Scheme == "https")
	if !isHTTP || u.Host == "" {
		return setting.Errorf("url", "it is not an http or https URL; write the address of a gateway")
	}

	return nil
}

// Control sequences of a terminal: move to the first column of the first line, and erase to the end of the line or of
// the screen.
const (
	home      = "\x1b[H"
	restLine  = "\x1b[K\n"
	restBelow = "\x1b[J"
)

// watch redraws the screen at each interval, until ctx ends. While the server does not answer, it shows the last answer
// and the error.
func watch(
	ctx context.Context, api *client.API, interval time.Duration, out io.Writer, size func() (width, height int),
) error {
	next := time.NewTicker(interval)
	defer next.Stop()

	// Drawn before the first answer, which may take as long as timeout.
	for s := (screen{}); ; {
		width, height := size()

		// No line uses the last column, because erasing after it would erase it. The last line has no line break,
		// because that would scroll.
		text := strings.TrimSuffix(s.text(max(width-1, min(width, 1)), height), "\n")
		text = home + strings.ReplaceAll(text, "\n", restLine) + restBelow
		if _, err := io.WriteString(out, text); err != nil {
			return err
		}

		_, d, err := ask(ctx, api)
		s.err = err
		// After an error the last answer stays, and so do rates between the last two.
		if err == nil {
			s.before = s.now
			s.now = d
		}

		select {
		case <-ctx.Done():
			_, err := io.WriteString(out, "\n")
			return err
		case <-next.C:
		}
	}
}

// ask returns an answer as text, without the line break, and as data.
func ask(ctx context.Context, api *client.API) (body json.RawMessage, d *data, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	_, err = api.Do(ctx, http.MethodGet, "/-/dashboard/data", nil, &body)
	if err == nil {
		err = json.Unmarshal(body, &d)
	}

	switch {
	case err == nil:
		return body, d, nil
	// Some other server may answer at this address with JSON, or with a page.
	case body != nil, errors.Is(err, client.ErrFrame):
		return nil, nil, fmt.Errorf("this is not a dashboard: %w", err)
	}

	return nil, nil, refusal(err)
}

// refusal returns why a server did not answer, with what to do.
func refusal(err error) error {
	no := (*client.Error)(nil)
	switch {
	case !errors.As(err, &no):
		return fmt.Errorf("the server does not answer: %w", err)
	case no.Status == http.StatusUnauthorized:
		return errors.New("the server requires a valid API key; give --api-key")
	case no.Status == http.StatusForbidden:
		return errors.New("the API key is for another site; give --site")
	}

	return fmt.Errorf("the server answers %d %s", no.Status, cmp.Or(no.Detail, http.StatusText(no.Status)))
}
