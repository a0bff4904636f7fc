package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/fstest"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/pipeline"
	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/unread"
	"headcount/webhook"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// empty is a gateway without users. The count of the page "old" is stale.
type empty struct{}

func (empty) Newest(_ context.Context, topics []presence.Topic) (updates []presence.Update, ok bool) {
	for _, t := range topics {
		updates = append(updates, presence.Update{Topic: t, Stale: t.Key == "old"})
	}

	return updates, true
}

func (empty) Known(topic presence.Topic) (presence.Update, bool) {
	return presence.Update{Topic: topic}, topic.Key != "old"
}

func (e empty) Read(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	return e.Newest(ctx, topics)
}

func (empty) Uncached([]presence.Topic) int                           { return 0 }
func (empty) Hold(context.Context, presence.User, string, bool) error { return nil }
func (empty) Users(context.Context, []presence.User) ([]presence.UserState, error) {
	return nil, nil
}

func (empty) Explain(context.Context, string) presence.Parts { return presence.Parts{} }

func (empty) Ready() error                          { return nil }
func (empty) Note(*http.Request, identity.Identity) {}
func (empty) Doubtful() bool                        { return false }

// serve returns the handler of calls, and the identities that it issues.
func serve(t testing.TB, keys []string, cfg Config) (http.Handler, *identity.Identities) {
	t.Helper()

	identities := identity.New(identity.Config{IDSecrets: [][]byte{[]byte("0123456789abcdef")}})
	t.Cleanup(identities.Close)

	sites, _ := identity.NewSites(nil) // an empty list is never an error, here and below
	siteKeys, err := identity.NewSiteKeys(keys, sites)
	if err != nil {
		t.Fatal(err)
	}

	proxies, _ := identity.NewProxies(nil)
	cfg.Origins, _ = identity.NewOrigins(nil)
	if cfg.Assets == nil {
		cfg.Assets = fstest.MapFS{}
	}

	store := presencemem.New(presencemem.Config{})
	cfg.LastSeen, cfg.Arrivals = store, webhook.New(webhook.Config{})
	access := Access{Identities: identities, Sites: sites, Keys: siteKeys, Proxies: proxies}
	callers := &Callers{Access: access, Restart: empty{}}

	instant := counter.CombinerConfig{Instant: true}
	counters := counterapi.Config{
		Rules:    &counter.Rules{},
		Counters: pipeline.New(countertest.InMemory(t, nil), &counter.Rules{}, instant, zerolog.Nop()),
	}

	api := New(cfg, Parts{
		Callers: callers, Counters: counterapi.New(counters, callers, counterapi.NewLive(counters, nil)),
		Counts: empty{}, Cluster: empty{}, Unread: store, Follows: unread.NewFollowService(store),
		Limits: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "limits"}, []string{"limit"}), Log: zerolog.Nop(),
	})

	return api.Engine(api.Calls()), identities
}

// call makes a call with these pairs of headers, which must be answered with the status.
func call(
	t *testing.T, h http.Handler, status int, method, target string, headers ...string,
) *httptest.ResponseRecorder {
	t.Helper()

	r := httptest.NewRequest(method, target, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}

	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != status {
		t.Fatalf("%s %s: %d, want %d: %s", method, target, w.Code, status, w.Body)
	}

	return w
}

// A stale count has another ETag than the same count that is not stale, since its JSON differs.
func TestETagOfAStaleCount(t *testing.T) {
	count := presence.Count{Version: presence.Version{Incarnation: 17, Sequence: 4}}
	if got := etag(count); got != `"17-4"` {
		t.Errorf("the ETag is %s, want \"17-4\"", got)
	}

	count.Stale = true
	if got := etag(count); got != `"17-4-s"` {
		t.Errorf("the ETag of the stale count is %s, want \"17-4-s\"", got)
	}
}
