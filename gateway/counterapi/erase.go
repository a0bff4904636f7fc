package counterapi

import (
	"context"
	"maps"
	"slices"

	"headcount/counter"
	"headcount/presence"
)

// ofSets is used for sets whose key has no rule any more.
var ofSets = &counter.Rule{Kind: counter.Members}

// Erase removes a user from all sets of a site. Unless server is set, it skips sets that members may not leave by
// themselves according to the rule. After an error, which is ErrUnavailable, the user may still be in some sets.
func (a *API) Erase(ctx context.Context, site presence.Site, user string, server bool) error {
	if counter.CheckMember(user) != nil {
		return nil // not a valid member, so it is in no set
	}

	for cursor := ""; ; {
		keys, next, err := a.cfg.Counters.Sets(ctx, cursor)
		if err != nil {
			return err
		}
		if err := a.eraseFrom(ctx, a.leavable(keys, site, server), user); err != nil {
			return err
		}

		cursor = next
		if cursor == "" {
			return nil
		}
	}
}

// leavable returns the sets among keys that belong to a site and that a member may leave, or that a server may remove
// the member from, with their rules.
func (a *API) leavable(keys []string, site presence.Site, server bool) map[string]*counter.Rule {
	rules := make(map[string]*counter.Rule, len(keys))
	for _, key := range keys {
		if of, _ := presence.SplitName(key); of != site {
			continue
		}

		rule := a.cfg.Rules.Find(key)
		open := rule != nil && rule.Allows(counter.PublicMember)
		if !server && !open {
			continue
		}

		// The rules may have changed since the set was created.
		if rule == nil || !rule.Kind.KnowsMembers() {
			rule = ofSets
		}
		rules[key] = rule
	}

	return rules
}

// eraseFrom removes a user from the given sets.
func (a *API) eraseFrom(ctx context.Context, rules map[string]*counter.Rule, user string) error {
	keys := slices.Collect(maps.Keys(rules))
	for some := range slices.Chunk(keys, counter.MaxKeys) {
		readings, err := a.cfg.Counters.Read(ctx, some, user, 0)
		if err != nil {
			return err
		}

		// Most sets lack the user, and a read is cheaper than a change.
		for _, r := range readings {
			if !r.Mine {
				continue
			}

			change := counter.Change{Key: r.Key, Rule: rules[r.Key], Verb: counter.Edit, Leave: []string{user}}
			made := a.cfg.Counters.Change(ctx, counter.Op{Changes: []counter.Change{change}})
			// The caller asks again, and finds the sets that are left.
			if made.Err != nil {
				return made.Err
			}
			a.live.remember(made.Counters[0])
		}
	}

	return nil
}
