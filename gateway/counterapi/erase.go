package counterapi

import (
	"context"
	"maps"
	"slices"

	"headcount/counter"
	"headcount/presence"
)

// ofSets stands for the rule of a set that no longer has one.
var ofSets = &counter.Rule{Kind: counter.Members}

// Erase removes a user from all sets of a site. Unless server is set, it leaves out those whose rule does not let
// members leave by themselves. After an error, which is ErrUnavailable, the user may still be in some sets.
func (a *API) Erase(ctx context.Context, site presence.Site, user string, server bool) error {
	if counter.CheckMember(user) != nil {
		return nil // such a user cannot be a member
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

// leavable returns the sets of a site among keys which a member may leave, or a server may make it leave, with the
// rule of each.
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

		// The rules may have changed since the set was made.
		if rule == nil || !rule.Kind.Forgets() {
			rule = ofSets
		}
		rules[key] = rule
	}

	return rules
}

// eraseFrom removes a user from sets, which it gets with their rules.
func (a *API) eraseFrom(ctx context.Context, rules map[string]*counter.Rule, user string) error {
	keys := slices.Collect(maps.Keys(rules))
	for some := range slices.Chunk(keys, counter.MaxKeys) {
		readings, err := a.cfg.Counters.Read(ctx, some, user, 0)
		if err != nil {
			return err
		}

		for _, r := range readings {
			if !r.Mine {
				continue
			}

			change := counter.Change{Key: r.Key, Rule: rules[r.Key], Verb: counter.Edit, Leave: []string{user}}
			made := a.cfg.Counters.Change(ctx, counter.Op{Changes: []counter.Change{change}})
			if made.Err != nil {
				return made.Err
			}
			a.live.remember(made.Counters[0])
		}
	}

	return nil
}
