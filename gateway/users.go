package gateway

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/fanout"
	"headcount/presence"
)

const (
	usersEvery   = time.Second     // between two questions about the users that streams follow
	usersTimeout = 3 * time.Second // of a question
	maxFollowed  = 10_000          // users that are followed at a time; a stream of further ones is 429
)

// userKind is the kind of the topics of users. Their values are JSON. The key is the user's id, which stays in this process.
var userKind = presence.KindOf("user")

// userWatch follows the users that event streams of servers name, and passes each to the hub when its state has changed, at most
// once a second. The owners of their partitions are asked, once for all streams. It implements fanout.Source. Any goroutine
// may call the methods.
type userWatch struct {
	g    *Gateway
	wake chan struct{} // holds one: somebody has begun to follow a user

	seq uint64 // of the updates, so that they are in order also for a user who is followed anew; run's own

	mu    sync.Mutex // guards users; the hub's lock may be held when it is taken
	users map[presence.Topic]*followedUser
}

// followedUser is a user of a stream. userWatch.run alone changes it.
type followedUser struct {
	hash   presence.User
	update presence.Update // the last one
}

func newUserWatch(g *Gateway) *userWatch {
	return &userWatch{g: g, wake: make(chan struct{}, 1), users: map[presence.Topic]*followedUser{}}
}

// getUserEvents answers a server with the event stream of users.
func (g *Gateway) getUserEvents(c *gin.Context) {
	users, ok := g.api.UsersAsked(c)
	if !ok {
		return
	}
	if err := g.api.Serving(); err != nil {
		api.Unavailable(c, err)
		return
	}
	topics := make([]presence.Topic, len(users))
	for i, user := range users {
		topics[i] = presence.TopicOf(userKind, g.callers.Site(c).Qualify(user))
	}
	g.users.mu.Lock()
	full := len(g.users.users)+len(topics) > maxFollowed
	g.users.mu.Unlock()
	if full {
		g.api.RefuseNewPages(c)
		return
	}
	g.serveEvents(c, topics, "")
}

// Want implements fanout.Source.
func (w *userWatch) Want(t presence.Topic) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.users[t] = &followedUser{hash: w.g.callers.Identities.Hash(t.Name()), update: presence.Update{Topic: t}}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Unwant implements fanout.Source.
func (w *userWatch) Unwant(t presence.Topic) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.users, t)
}

// run asks about the users until ctx ends. It alone passes updates to the hub.
func (w *userWatch) run(ctx context.Context) {
	tick := time.NewTicker(usersEvery)
	defer tick.Stop()
	for {
		fresh := false
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-w.wake:
			fresh = true
		}
		w.mu.Lock()
		users := make([]*followedUser, 0, len(w.users))
		for _, u := range w.users {
			if !fresh || u.update.Value == "" {
				users = append(users, u)
			}
		}
		w.mu.Unlock()
		for some := range slices.Chunk(users, presence.MaxAsked) {
			w.ask(ctx, some)
		}
	}
}

// ask asks about users. When their owners do not answer, they stay as they are.
func (w *userWatch) ask(ctx context.Context, users []*followedUser) {
	ctx, cancel := context.WithTimeout(ctx, usersTimeout)
	defer cancel()
	hashes := make([]presence.User, len(users))
	for i, u := range users {
		hashes[i] = u.hash
	}
	states, err := w.g.cfg.Cluster.Users(ctx, hashes)
	if err != nil {
		w.g.cfg.Log.Debug().Err(err).Msg("users that streams follow could not be asked about")
		return
	}
	for i, u := range users {
		value := string(api.AppendUser(nil, u.update.Key, states[i]))
		if value == u.update.Value {
			continue
		}
		w.seq++
		u.update.Value, u.update.Version = value, presence.Version{Incarnation: 1, Sequence: w.seq}
		w.mu.Lock()
		followed := w.users[u.update.Topic] == u
		w.mu.Unlock()
		if followed {
			w.g.hub.Update(u.update)
		}
	}
}

// namedEvent encodes topics whose values are JSON as events of that name, which only event streams have. It implements
// fanout.Encoder.
type namedEvent string

// Encode implements fanout.Encoder.
func (name namedEvent) Encode(b []byte, u presence.Update, _ fanout.Form) (encoded []byte, shown uint64) {
	b = append(append(b, "event: "...), name...)
	b = append(append(b, "\ndata: "...), u.Value...)
	return append(b, "\n\n"...), 0
}

// Exact implements fanout.Encoder.
func (namedEvent) Exact(presence.Update) bool { return true }
