package counterapi

import (
	"context"
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
		rules := make(map[string]*counter.Rule, len(keys))
		keys = slices.DeleteFunc(keys, func(key string) bool {
			if of, _ := presence.SplitName(key); of != site {
				return true
			}
			rule := a.cfg.Rules.Find(key)
			if !server && (rule == nil || !rule.Allows(counter.PublicMember)) {
				return true
			}
			if rule == nil || rule.Kind != counter.Members { // the rules have changed since the set was made
				rule = ofSets
			}
			_, twice := rules[key]
			rules[key] = rule
			return twice
		})
		for some := range slices.Chunk(keys, counter.MaxKeys) {
			readings, err := a.cfg.Counters.Read(ctx, some, user, 0)
			if err != nil {
				return err
			}
			for _, r := range readings {
				if !r.Mine {
					continue
				}
				made := a.cfg.Counters.Change(ctx, counter.Op{Changes: []counter.Change{{Key: r.Key, Rule: rules[r.Key], Verb: counter.Edit, Leave: []string{user}}}})
				if made.Err != nil {
					return made.Err
				}
				a.live.remember(made.Counters[0])
			}
		}
		if cursor = next; cursor == "" {
			return nil
		}
	}
}
