// Package top is the dashboard in a terminal. It asks a server for the data of its dashboard,
// once in an interval, and draws them anew. Scripts take one answer with --once.
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

	tea "github.com/charmbracelet/bubbletea"
	"github.com/mattn/go-isatty"
)

const (
	patience = 5 * time.Second // for one answer
	maxBody  = 4 << 20         // of one answer: a hundred pages, and a thousand processes
)

// ErrSettings is in errors about flags.
var ErrSettings = errors.New("bad setting")

// Command is `headcount top`.
type Command struct {
	URL      string        `name:"url" type:"text" placeholder:"URL" default:"http://127.0.0.1:8080" help:"A gateway of the cluster; any of them knows all."`
	APIKeys  []string      `name:"api-key" type:"each" placeholder:"KEY" help:"A key of the server, if it has any. Give it in the environment: everyone may read command lines."`
	Site     string        `name:"site" type:"text" placeholder:"NAME" help:"The site whose pages are shown; without it the first one of the server."`
	Interval time.Duration `type:"span" placeholder:"TIME" default:"1s" help:"The time between two answers. The server has a new one once a second."`
	Once     bool          `help:"Print one answer, and end."`
	JSON     bool          `name:"json" help:"With --once: print the answer as JSON."`
}

// Run shows the dashboard until the person quits or ctx ends.
func (c *Command) Run(ctx context.Context, in io.Reader, out io.Writer) error {
	u, err := url.Parse(c.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("--url: %w: it is not an http or https URL; write the address of a gateway", ErrSettings)
	}
	ask := &client{url: strings.TrimSuffix(c.URL, "/") + "/-/dashboard/data"}
	if len(c.APIKeys) > 0 {
		ask.key = c.APIKeys[0]
	}
	ask.site = c.Site
	switch file, isFile := out.(*os.File); {
	case c.JSON && !c.Once:
		return fmt.Errorf("--json: %w: it needs --once", ErrSettings)
	case c.Once:
		body, d, err := ask.get(ctx)
		if err != nil {
			return err
		}
		if !c.JSON {
			body = []byte(screen{now: d}.text(0, 0))
		}
		_, err = out.Write(body)
		return err
	case isFile && !isatty.IsTerminal(file.Fd()):
		return fmt.Errorf("--once: %w: it is needed where the output is no terminal", ErrSettings)
	}
	program := tea.NewProgram(&model{ctx: ctx, ask: ask, interval: c.Interval}, tea.WithContext(ctx), tea.WithInput(in), tea.WithOutput(out), tea.WithAltScreen(), tea.WithoutSignalHandler())
	if _, err = program.Run(); ctx.Err() != nil {
		return nil // it was ended, as it should be
	}
	return err
}

// client asks the server.
type client struct{ url, key, site string }

// get returns an answer as it came, and as data.
func (c *client) get(ctx context.Context) ([]byte, *data, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url, nil)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Accept", "application/json")
	if c.key != "" {
		req.Header.Set("X-API-Key", c.key)
	}
	if c.site != "" {
		req.Header.Set("Headcount-Site", c.site)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, fmt.Errorf("the server does not answer: %w", err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return nil, nil, errors.New("the server asks for an API key, and has not got the right one; give --api-key")
	case resp.StatusCode == http.StatusForbidden:
		return nil, nil, errors.New("the server's key holds for another site; give --site")
	case resp.StatusCode != http.StatusOK:
		return nil, nil, fmt.Errorf("the server answers %s", resp.Status)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, nil, fmt.Errorf("the server's answer ends early: %w", err)
	}
	d := &data{}
	if err := json.Unmarshal(body, d); err != nil {
		return nil, nil, fmt.Errorf("this is no dashboard: %w", err)
	}
	return body, d, nil
}

// model is the screen and its keys. bubbletea calls its methods one at a time.
type model struct {
	ctx      context.Context
	ask      *client
	interval time.Duration

	width, height int
	paused        bool
	screen        screen
}

type (
	answered struct {
		data *data
		err  error
	}
	due struct{} // an interval has passed
)

// fetch asks for the next answer. At most one is under way: it is called at the start, and when
// the interval after an answer is over.
func (m *model) fetch() tea.Msg {
	_, d, err := m.ask.get(m.ctx)
	return answered{d, err}
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return m.fetch }

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyMsg:
		switch msg.String() {
		case "q", "esc", "ctrl+c":
			return m, tea.Quit
		case " ", "p":
			m.paused = !m.paused
		}
	case answered:
		m.screen.err = msg.err
		if msg.err == nil && !m.paused {
			m.screen.before, m.screen.now = m.screen.now, msg.data
		}
		return m, tea.Tick(m.interval, func(time.Time) tea.Msg { return due{} })
	case due:
		return m, m.fetch
	}
	return m, nil
}

// View implements tea.Model.
func (m *model) View() string {
	m.screen.paused = m.paused
	return m.screen.text(m.width, m.height)
}
