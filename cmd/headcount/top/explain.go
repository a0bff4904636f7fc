package top

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"headcount/client"
	"headcount/internal/setting"
)

// Explain is `headcount explain`.
type Explain struct {
	Page    string   `arg:"" env:"-" type:"text" placeholder:"PAGE" help:"The page; * is the whole site."`
	URL     string   `name:"url" type:"text" placeholder:"URL" default:"http://127.0.0.1:8080" help:"Any gateway of the cluster."`
	APIKeys []string `name:"api-key" type:"each" placeholder:"KEY" help:"A key of the server, if it has any. Give it in the environment: everyone may read command lines."`
	Site    string   `name:"site" env:"-" type:"text" placeholder:"NAME" help:"The site of the page; without it the first one of the server."`
	JSON    bool     `name:"json" help:"Print the answer as JSON."`
}

// explained is the answer of a server.
type explained struct {
	Counter struct {
		Page  string
		Count int64
	}
	Explain struct {
		People, Connections, Held, Leaving, Ignored int64
		Regions                                     map[string]int64
		Moving                                      bool
	}
}

// Run prints what the count of a page is made of.
func (c *Explain) Run(ctx context.Context, out io.Writer) error {
	if c.Page == "" {
		return setting.Errorf("page", "it is missing; write headcount explain PAGE")
	}
	if err := checkURL(c.URL); err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	var body json.RawMessage
	var is explained
	api := client.NewAPI(client.Config{URL: c.URL, Site: c.Site, APIKey: keyOf(c.APIKeys, c.Site)})
	// The raw answer is kept for --json, so that members which this program does not know are printed, too.
	_, err := api.Do(ctx, http.MethodGet, "/"+url.PathEscape(c.Page)+"/counter?explain=1", nil, &body)
	if err != nil {
		return refusal(err)
	}
	if err := json.Unmarshal(body, &is); err != nil || is.Explain.Regions == nil {
		return fmt.Errorf("the server at %s explains no counts; is it of an older release?", c.URL)
	}

	if c.JSON {
		_, err = fmt.Fprintf(out, "%s\n", body)
	} else {
		_, err = io.WriteString(out, is.text())
	}

	return err
}

// text returns the answer for people.
func (is explained) text() string {
	var b strings.Builder
	e := is.Explain
	fmt.Fprintf(&b, "%s: %d\n", plain(is.Counter.Page), is.Counter.Count)
	// Sorted, because the order of a map changes from call to call.
	for _, name := range slices.Sorted(maps.Keys(e.Regions)) {
		fmt.Fprintf(&b, "%9d  from the region %s\n", e.Regions[name], cmp.Or(plain(name), "of this server"))
	}

	fmt.Fprintf(&b, "In the region of this server: %d people\n", e.People)
	for _, row := range []struct {
		n    int64
		text string
	}{
		{e.People - e.Held - e.Leaving, fmt.Sprintf("with a connection (%d connections)", e.Connections)},
		{e.Held, "by a hold alone"},
		{e.Leaving, "whose last connection is gone, in their grace"},
	} {
		fmt.Fprintf(&b, "%9d  %s\n", row.n, row.text)
	}
	fmt.Fprintf(&b, "Not counted: %d connections of crawlers\n", e.Ignored)

	// A change that is under way may be in one part and not yet in another.
	if e.Moving {
		b.WriteString("Changes are under way, so the parts may not add up yet. Ask again.\n")
	} else {
		b.WriteString("Nothing moves: the parts add up to the count.\n")
	}

	return b.String()
}
