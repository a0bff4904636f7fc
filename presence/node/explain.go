package node

import (
	"context"
	"errors"

	"headcount/presence"
)

// explainRequest asks an actor what its part of a page's count is made of.
type explainRequest struct {
	page   string                // a page, or the total of a site
	answer chan<- presence.Parts // has room for the answer
}

func (c *explainRequest) deliver(p *partition) { c.answer <- p.explain(c.page) }

// Explain returns what the count of a page, or of a site, is made of in the partitions that this node owns. A partition
// that it stops owning meanwhile is left out.
func (n *Node) Explain(ctx context.Context, page string) (sum presence.Parts, err error) {
	asked := map[*partition]chan presence.Parts{}
	for i := range n.actors {
		p := n.actors[i].Load()
		if p == nil {
			continue
		}

		// With room, so that an actor does not wait for a caller that gave up.
		answer := make(chan presence.Parts, 1)
		err := p.ask(ctx, &explainRequest{page, answer})
		if errors.Is(err, presence.ErrNotOwner) {
			continue
		}
		if err != nil {
			return sum, err
		}
		asked[p] = answer
	}

	// All actors have the question by now, so the slowest one determines the wait, not their sum.
	for p, answer := range asked {
		parts, err := await(ctx, p, answer)
		if errors.Is(err, presence.ErrNotOwner) {
			continue
		}
		if err != nil {
			return sum, err
		}
		sum.Add(parts)
	}

	return sum, nil
}

// explain answers a question about a page. It scans every user: there is no index of the users on a page, because
// nothing else needs one.
func (p *partition) explain(page string) (parts presence.Parts) {
	for u := range p.users {
		switch p.stayOf(u, page) {
		case absent:
			continue
		case held:
			parts.Held++
		case leaving:
			parts.Leaving++
		}
		parts.People++
	}

	// Only a settled partition is known to agree with the store: before that, the store may count other people.
	if p.takeover.complete && p.out.settled() {
		parts.Settled = 1
	}

	return parts
}

// stay is how a user is on a page.
type stay uint8

const (
	absent stay = iota
	leaving
	held // by a hold, and no connection
	connected
)

// stayOf returns how the user is on a page, or on the site whose total it is. Of several sessions the firmest decides.
func (p *partition) stayOf(u presence.User, page string) (firmest stay) {
	pg := p.pages[page]
	isTotal := presence.TotalOf(page) == page

	for s := p.users[u]; s != nil; s = s.next {
		switch {
		case isTotal:
			firmest = max(firmest, s.stayOnSite(page, p.holds))
		case pg != nil:
			firmest = max(firmest, s.stayOn(pg, p.holds))
		}
	}

	return firmest
}

// stayOn returns how the session is on a page.
func (s *session) stayOn(pg *page, holds *source) stay {
	pp := s.find(pg)
	if pp == nil {
		return absent
	}

	return s.stay(holds, pp.until == 0)
}

// stayOnSite returns how the session is on a site. All pages of a session are on the same site.
func (s *session) stayOnSite(total string, holds *source) stay {
	if len(s.list) == 0 || presence.TotalOf(s.list[0].page.name) != total {
		return absent
	}

	return s.stay(holds, s.live())
}

func (s *session) stay(holds *source, openEnded bool) stay {
	switch {
	case openEnded:
		return connected
	case s.from == holds:
		return held
	default:
		return leaving
	}
}
