package owner

import (
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// partition is what an owner has of a partition in memory. Who has the owner's turn owns the fields from epoch on.
type partition struct {
	id     int
	queue  []*pending // calls for later turns, guarded by Owner.mu
	unsure bool       // the outcome of commit is unknown, guarded by Owner.mu

	epoch  uint64                            // of the claim
	number uint64                            // of the newest commit that the store has, as far as the owner knows
	rows   generations[rows.Name, row]       // as of that commit
	ids    generations[[16]byte, remembered] // that this owner wrote, or that the store remembered
	calls  []*pending                        // in the turn
	draft  *draft                            // what they change
	commit rows.Commit                       // what goes to the store, unchanged until its outcome is known
}

// row is a row in memory. A nil value says that it does not exist.
type row struct {
	value []byte
	// number is that of the commit that wrote the row, or a greater one: a store that has this number has the row.
	number uint64
}

// rowSize returns about what a row takes in memory.
func rowSize(name rows.Name, value []byte) int {
	return len(name.Collection) + len(name.Field) + len(value) + 100
}

// idSize is about what an ID takes in memory.
const idSize = 100

// remembered is an ID that was used. Its number is like that of a row.
type remembered struct {
	until  time.Time
	number uint64
}

// outcome is the answer to one call, or the error.
type outcome struct {
	Answer
	err error
}

func newPartition(id int, claim rows.Claim) *partition {
	return &partition{id: id, epoch: claim.Epoch, number: claim.Number}
}

// take moves waiting calls into the turn, but only one of each stream: the second may be a repetition of the first. The
// caller has Owner.mu.
func (p *partition) take(most int) {
	streams := map[string]bool{}
	changes := 0

	left := p.queue[:0:0]
	for _, one := range p.queue {
		if streams[one.Stream] || changes >= most {
			left = append(left, one)
			continue
		}

		streams[one.Stream] = true
		changes += one.changes
		p.calls = append(p.calls, one)
	}
	p.queue = left
}

// callQueue has the callers in the queue make a turn. The caller has Owner.mu.
func (p *partition) callQueue() {
	if p.unsure {
		return
	}

	for _, one := range p.queue {
		wake.Signal(one.ready)
	}
}

// judge drafts the calls in the turn.
func (p *partition) judge(now time.Time) {
	p.draft = newDraft(p, now)
	for _, one := range p.calls {
		p.draft.judge(one.Call)
	}
}

// nothing returns a commit that changes nothing.
func (p *partition) nothing() rows.Commit {
	p.draft = newDraft(p, time.Now())

	return p.draft.commit()
}

// healing returns a commit of everything that a store may lack that granted the claim.
func (p *partition) healing(claim rows.Claim) rows.Commit {
	p.epoch = claim.Epoch

	p.draft = newDraft(p, time.Now())
	for name, is := range p.rows.all() {
		if is.number > claim.Number {
			p.draft.put(name, is.value)
		}
	}
	for id, is := range p.ids.all() {
		if is.number > claim.Number && is.until.After(p.draft.now) {
			p.draft.ids = append(p.draft.ids, rows.ID{Bytes: id, Until: is.until})
		}
	}
	p.draft.notifyAll()

	commit := p.draft.commit()
	commit.After = claim.Number
	// What the store has may come from another owner, which got further than this one.
	commit.Number = max(p.number, claim.Number) + 1

	return commit
}

// learn remembers IDs that the store remembered.
func (p *partition) learn(ids []rows.ID) {
	for _, id := range ids {
		p.ids.put(id.Bytes, remembered{until: id.Until, number: p.commit.After}, idSize)
	}
}

// landDraft moves the draft, which the store has, into memory, and returns the answers to the calls.
func (p *partition) landDraft() []outcome {
	d := p.draft
	p.draft = nil

	for name, value := range d.rows {
		p.rows.put(name, row{value: value, number: p.number}, rowSize(name, value))
	}
	for _, id := range d.ids {
		p.ids.put(id.Bytes, remembered{until: id.Until, number: p.number}, idSize)
	}

	return d.outcomes
}
