package owner

import (
	"time"

	"headcount/internal/rows"
)

// partition is what an owner has of a partition in memory. Who has the owner's turn owns the fields from epoch on.
type partition struct {
	id     int
	queue  []*pending    // calls for later turns, guarded by Owner.mu
	listed bool          // it is in Owner.busy, guarded by Owner.mu
	unsure bool          // settle makes commits and learns their outcomes, guarded by Owner.mu
	healed chan struct{} // closed when what a store has lost is there again; nil: it has all. Guarded by Owner.mu

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
}

func newPartition(id int, claim rows.Claim, m *memory) *partition {
	p := &partition{id: id, epoch: claim.Epoch, number: claim.Number}
	p.rows = generations[rows.Name, row]{budget: &m.cache, sizeOf: rowSize}
	p.written = generations[rows.Name, row]{budget: &m.recent, sizeOf: rowSize}
	p.ids = generations[[16]byte, remembered]{budget: &m.recent, sizeOf: idSize}

	return p
}

// learn remembers IDs that the store remembers, until the calls that use them are made.
func (p *partition) learn(ids []rows.ID) {
	knownToStore.Reached()
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
		d.near.land(p.id, d.heads)
		return // the store has the other rows, and is as near as this memory
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
