package owner

import (
	"time"

	"headcount/internal/rows"
)

// partition is a partition in the memory of its owner. The holder of the owner's turn owns the fields from epoch on.
type partition struct {
	id     int
	queue  []*pending // calls for later turns, guarded by Owner.mu
	listed bool       // the partition is in Owner.busy; guarded by Owner.mu
	// unsure says that claimAgain or commitAll has the partition, until it is claimed and the outcomes of its commits
	// are known. Guarded by Owner.mu.
	unsure bool
	healed chan struct{} // closed when the lost rows are written again; nil: none are lost. Guarded by Owner.mu

	exactOutside bool // exact counters are in partition Outside

	epoch   uint64                            // of the claim
	number  uint64                            // of the newest commit that is known to be stored
	meta    meta                              // as of that commit
	rows    generations[rows.Name, row]       // rows that were used last, as of that commit
	written generations[rows.Name, row]       // rows that were written last
	ids     generations[[16]byte, remembered] // IDs that were written last
	known   map[[16]byte]time.Time            // IDs that the store has just refused, for the next turn
	calls   []*pending                        // calls in the turn
	draft   *draft                            // the changes of these calls
}

func newPartition(id int, claim rows.Claim, m *memory) *partition {
	p := &partition{id: id, epoch: claim.Epoch, number: claim.Number}
	p.rows = generations[rows.Name, row]{budget: &m.cache, sizeOf: rowSize}
	p.written = generations[rows.Name, row]{budget: &m.recent, sizeOf: rowSize}
	p.ids = generations[[16]byte, remembered]{budget: &m.recent, sizeOf: idSize}

	return p
}

// learn keeps the IDs that the store remembers until the calls that use them are judged again.
func (p *partition) learn(ids []rows.ID) {
	knownToStore.Reached()
	if p.known == nil {
		p.known = map[[16]byte]time.Time{}
	}
	for _, id := range ids {
		p.known[id.Bytes] = id.Until
	}
}

// landDraft moves the draft into memory, after the store has committed it.
func (p *partition) landDraft() {
	d := p.draft
	p.meta = d.meta
	// If a later call uses one of these IDs, the store refuses its commit again.
	p.known = nil
	if d.near != nil {
		d.near.land(p.id, d.heads)
		return // a store in memory has all other rows, so they are not cached
	}

	for i := range d.rows.list {
		e := &d.rows.list[i]
		if e.name.Collection == beside {
			continue // the row belongs to another partition, whose owner may change it
		}

		is := row{value: e.value, number: p.number}
		// An unchanged row that came from memory is there already.
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
