package counterapi

import (
	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/identity"
)

// me stands for the caller as a member.
const me = "me"

var errNoMe = calls.Refuse(calls.ErrNobody, "A server has no identity of its own, so there is no member me; "+
	"name the member, or send the id of a user in the header "+identity.Header+".")

// addMember adds a member to a set.
func (a *API) addMember(c *gin.Context) (calls.Answer, error) {
	one, member, err := a.member(c, true)
	if err != nil {
		return calls.Answer{}, err
	}

	change := counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Edit, Join: []string{member}}

	return a.changeMember(c, one, change, true)
}

// removeMember removes a member from a set.
func (a *API) removeMember(c *gin.Context) (calls.Answer, error) {
	one, member, err := a.member(c, false)
	if err != nil {
		return calls.Answer{}, err
	}

	return a.changeMember(c, one, leave(one, member), false)
}

// leave is the change that removes a member from the set of a call.
func leave(one call, member string) counter.Change {
	return counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Edit, Leave: []string{member}}
}

// changeMember makes a change that adds a member to a set, if joins is set, or removes it.
func (a *API) changeMember(c *gin.Context, one call, change counter.Change, joins bool) (calls.Answer, error) {
	if err := a.noBody(c, one); err != nil {
		return calls.Answer{}, err
	}

	// A caller without identity is in no set, so there is nothing to remove.
	if !joins && change.Leave[0] == "" {
		return a.answerMember(c, one, "")
	}

	if !one.server {
		if err := a.limit(c, one, &change); err != nil {
			return calls.Answer{}, err
		}
		if a.callers.Crawler(c.Request) {
			return a.unchangedSet(c, one)
		}
	}

	made, err := a.make(c, counter.Op{Changes: []counter.Change{change}})
	if err != nil {
		return calls.Answer{}, err
	}

	// A server names the member, and has no identity to keep.
	if one.id.User != "" {
		a.callers.Issue(c, one.id)
	}

	return answerMember(made[0], joins), nil
}

// noBody returns an error if the request has a body with any content.
func (a *API) noBody(c *gin.Context, one call) error {
	text, err := a.body(c, one.server)
	if err != nil {
		return err
	}
	if err := counter.ParseNothing(text); err != nil {
		return badBody(err)
	}

	return nil
}

// unchangedSet answers a crawler with the set as it is. Crawlers are never members.
func (a *API) unchangedSet(c *gin.Context, one call) (calls.Answer, error) {
	is, err := a.readOne(c, one, 0)
	if err != nil {
		return calls.Answer{}, err
	}

	return answerMember(is, false), nil
}

func (a *API) getMember(c *gin.Context) (calls.Answer, error) {
	one, member, err := a.member(c, false)
	if err != nil {
		return calls.Answer{}, err
	}

	return a.answerMember(c, one, member)
}

// answerMember answers whether a member is in a set. The empty member is in none.
func (a *API) answerMember(c *gin.Context, one call, member string) (calls.Answer, error) {
	ctx, cancel := a.within(c)
	defer cancel()

	read, err := a.read(ctx, []string{one.key}, member, 0)
	if err != nil {
		return calls.Answer{}, a.failed(c, err)
	}

	// A caller that may ask about a member is also allowed to remove it.
	change := leave(one, member)
	if conflict := change.Refusal(read[0].Counter); conflict != nil {
		return calls.Answer{}, conflict
	}

	return answerMember(read[0].Counter, read[0].Mine), nil
}

// member returns the set and the member in the path, if the caller has permission. If issues is set, a caller without
// an identity gets one. Otherwise its member is empty, which is in no set.
func (a *API) member(c *gin.Context, issues bool) (one call, member string, err error) {
	one, err = a.named(c)
	if err != nil {
		return one, "", err
	}

	member, err = param(c, "member")
	if err == nil && member != me {
		err = counter.CheckMember(member)
	}
	if err != nil {
		return one, "", calls.Bad("This cannot be a member: " + why(err, counter.ErrMember) +
			". Send 1 to 128 characters without control characters, percent-encoded.")
	}

	// Only a server may name somebody else.
	if member != me {
		return one, member, one.permits(nobody)
	}
	if err := one.permits(counter.PublicMember); err != nil {
		return one, "", err
	}

	one.id, err = a.callers.Identify(c)
	if err != nil {
		return one, "", err
	}
	member, err = ownMember(one, issues)

	return one, member, err
}

// ownMember returns the caller as a member, or "" if the caller has no identity and does not get one.
func ownMember(one call, issues bool) (string, error) {
	// A server that sends the id of a user acts for that user.
	if one.server && one.id.Fresh {
		return "", errNoMe
	}

	// Reads and removals issue no identity, because a new identity cannot be a member yet.
	unknown := one.id.Fresh && !one.id.Derived
	if unknown && !issues {
		return "", nil
	}

	if err := counter.CheckMember(one.id.User); err != nil {
		return "", calls.Bad("The user of the token cannot be a member: " + err.Error() + ".")
	}

	return one.id.User, nil
}
