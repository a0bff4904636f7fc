package gateway

import (
	"context"
	"slices"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/conn"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const usersTimeout = 3 * time.Second // of a question about users

// userKind is the kind of the topics of users. Their values are JSON. The key is the user's id, which stays in this
// process.
var userKind = presence.KindOf("user")

// getUserEvents answers a server with the event stream of users.
func (g *Gateway) getUserEvents(c *gin.Context) (calls.Answer, error) {
	users, err := g.api.UsersAsked(c)
	if err != nil {
		return calls.Answer{}, err
	}

	if err := g.api.Serving(); err != nil {
		return calls.Answer{}, api.Unavailable(err)
	}

	topics := make([]presence.Topic, len(users))
	for i, user := range users {
		topics[i] = presence.TopicOf(userKind, g.callers.Site(c).Qualify(user))
	}
	// Some of these users may be followed already and are counted twice then: the bound need not be exact.
	_, followed := g.users.Wanted(topics[0])
	if followed+len(topics) > bounds.FollowedUsers.Max {
		return calls.Answer{}, g.api.TooManyPages()
	}

	return g.serveEvents(c, conn.Events{Topics: topics})
}

// userStates asks the owners of partitions about users. It implements fanout.Polled.
type userStates struct{ g *Gateway }

// Values implements fanout.Polled. Users whose owners do not answer have none.
func (s userStates) Values(ctx context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	for some := range slices.Chunk(topics, presence.MaxAsked) {
		hashes := make([]presence.User, len(some))
		for i, t := range some {
			hashes[i] = s.g.callers.Identities.Hash(t.Name())
		}

		// Each group has a time of its own, so that a slow one leaves the others theirs.
		within, cancel := context.WithTimeout(ctx, usersTimeout)
		states, err := s.g.cfg.Cluster.Users(within, hashes)
		cancel()

		if err != nil {
			s.g.cfg.Log.Debug().Err(err).Msg("reading the users that event streams watch failed; retrying")
			continue // the owners of the others may answer
		}

		for i, t := range some {
			found(t, string(httppolicy.JSON(api.UserOf(t.Key, states[i]))), false)
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
