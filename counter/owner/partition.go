package owner

import (
	"time"

	"headcount/internal/rows"
)

// partition is what an owner has of a partition in memory. Who has the owner's turn owns the fields from epoch on.
type partition struct {
	id     int
	queue  []*pending // calls for later turns, guarded by Owner.mu
	listed bool       // it is in Owner.busy, guarded by Owner.mu
	unsure bool       // the outcome of commit is unknown, guarded by Owner.mu

	exactOutside bool // exact counters are in partition Outside

	epoch   uint64                            // of the claim
	number  uint64                            // of the newest commit that the store has, as far as the owner knows
	meta    meta                              // as of that commit
	rows    generations[rows.Name, row]       // those that were used last, as of that commit
	written generations[rows.Name, row]       // those that were written last, too
	ids     generations[[16]byte, remembered] // that were written last
	known   map[[16]byte]time.Time            // that the store has just refused to use again, for the next turn
	calls   []*pending                        // in the turn
	draft   *draft                            // what they change
	commit  rows.Commit                       // whose outcome is unknown; unchanged until it is known
}

func newPartition(id int, claim rows.Claim, m *memory) *partition {
	p := &partition{id: id, epoch: claim.Epoch, number: claim.Number}
	p.rows = generations[rows.Name, row]{budget: &m.cache, sizeOf: rowSize}
	p.written = generations[rows.Name, row]{budget: &m.recent, sizeOf: rowSize}
	p.ids = generations[[16]byte, remembered]{budget: &m.recent, sizeOf: idSize}

	return p
}

// healing has the draft write everything that a store may lack that granted the claim, and returns the commit.
func (p *partition) healing(claim rows.Claim, publish bool) rows.Commit {
	p.epoch = claim.Epoch

	d := p.draft
	// A row may be in both. They have the same value.
	for _, some := range []*generations[rows.Name, row]{&p.rows, &p.written} {
		for name, is := range some.all() {
			if is.number > claim.Number {
				d.put(name, is.value)
			}
		}
	}
	for id, is := range p.ids.all() {
		if is.number > claim.Number && is.until.After(d.now) {
			d.remember(rows.ID{Bytes: id, Until: is.until})
		}
	}
	// The meta row is in neither.
	d.meta = p.meta
	d.metaChanged = p.meta.loaded
	d.notifyAll()

	var commit rows.Commit
	d.commit(&commit, publish)
	commit.After = claim.Number
	// What the store has may come from another owner, which got further than this one.
	commit.Number = max(p.number, claim.Number) + 1

	return commit
}

// learn remembers IDs that the store remembers, until the calls that use them are made.
func (p *partition) learn(ids []rows.ID) {
	if p.known == nil {
		p.known = map[[16]byte]time.Time{}
	}
	for _, id := range ids {
		p.known[id.Bytes] = id.Until
	}
}

// landDraft moves the draft, which the store has, into memory.
func (p *partition) landDraft() {
	d := p.draft
	p.meta = d.meta
	p.known = nil
	if d.near != nil {
		return // the store itself is as near
	}

	for i := range d.rows.list {
		e := &d.rows.list[i]
		if e.name.Collection == beside {
			continue // another owner may change it
		}

		is := row{value: e.value, number: p.number}
		// What came from memory and stayed as it was is there already.
		if e.written || !e.cached && !e.unknown {
			p.rows.put(e.name, is)
		}
		if e.written {
			p.written.put(e.name, is)
		}
	}
	for _, id := range d.ids {
		p.ids.put(id.Bytes, remembered{until: id.Until, number: p.number})
	}
}
