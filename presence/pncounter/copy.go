package pncounter

import "errors"

// PagePair is a page's pair.
type PagePair struct {
	Page string
	Pair
}

// ErrRefused is in the errors of a peer that this region must not share counts
// with; the text says why.
var ErrRefused = errors.New("the peer is refused")

// Regions is what a region knows of the others.
type Regions struct {
	Identity string            // of this region; empty when it has none yet
	Heard    map[string]string // by name; another value than before: it was heard since
	Out      []string          // left out of totals, by the region's decision
}

// Position is how far a peer has one bucket of a region's log.
type Position struct {
	Bucket      int
	Log, Cursor uint64
	Done        bool // it has been at an end of the log
}

// Batch is what a region tells another of one bucket. A region logs which of a
// bucket's pages changed, each page at its last change. A batch says what pages
// changed after From, up to To, and their pairs as they are now. Batches may be
// lost, repeated and overtaken.
type Batch struct {
	Region string // whose pairs these are
	Bucket int
	// Log tells logs of the bucket apart: a region that lost data begins another,
	// with a number above all incarnations it has used, from 0.
	Log      uint64
	From, To uint64
	// Floor is the lowest incarnation of the log's pairs: the pairs that came
	// before it, and that the log does not name again, are of pages where nobody
	// is any more.
	Floor uint64
	// Complete says that To is the end of the log, and that the log has all of
	// the region's pages.
	Complete bool
	// For the sender alone. More: the log goes on after To. Forgotten: the log has
	// forgotten a page after From; nothing is in the batch, and a log must begin
	// that voids what it does not name. Partial: the region has not written all of
	// its users yet, so that its pairs would replace better ones.
	More, Forgotten, Partial bool
	Pages                    []PagePair
}

// Status is what became of a batch.
type Status int

const (
	Merged  Status = iota // or known already
	Unready               // the receiver knows nothing of its own yet: again later
	Behind                // a later life of the region is known: begin a log above Ack.High
	Gap                   // what came before the batch is missing: send from Ack.Cursor on
	Failed                // the receiver's bucket cannot be used, Ack.Err says why
)

// Ack is the answer to a batch: where the receiver is now.
type Ack struct {
	Status Status
	Log    uint64 // the log known, or the batch's
	Cursor uint64 // all up to here is known
	// High is the highest incarnation of the region that is known. What the region
	// begins anew must be above.
	High uint64
	// Done says that the log has been received up to an end of it.
	Done bool
	// Changed is the number of pages whose pair was news, Malformed that of pages of
	// the receiver that held what nobody could read; it has been written anew.
	Changed, Malformed int
	// Refused are the places in Batch.Pages of pairs whose incarnation is lower
	// than one known of the page: their region must give them a higher one.
	Refused []int
	Err     error
}

// Copy is what a region has of another one's bucket. It says what merge.lua
// must do; the zero Copy knows nothing. Not for concurrent use.
type Copy struct {
	Log, Cursor uint64
	Floor, High uint64
	Done        bool
	Pairs       map[string]Pair
}

// Merge takes a batch.
func (c *Copy) Merge(b Batch) Ack {
	switch {
	case b.Log < c.Log, b.Log > c.Log && b.Log <= max(c.High, c.Floor):
		return c.ack(Behind)
	case b.Log > c.Log && b.From > 0:
		return Ack{Status: Gap, Log: b.Log, High: max(c.High, c.Floor)}
	case b.Log > c.Log:
		c.Log, c.Cursor, c.Done = b.Log, 0, false
		c.High = max(c.High, b.Log)
	case b.From > c.Cursor:
		return c.ack(Gap)
	}
	var refused []int
	if b.To > c.Cursor { // else all of it is known, or has been forgotten since
		if c.Pairs == nil {
			c.Pairs = map[string]Pair{}
		}
		for i, p := range b.Pages {
			c.High = max(c.High, p.Incarnation)
			old, known := c.Pairs[p.Page]
			switch {
			case p.Incarnation < max(old.Incarnation, c.Floor):
				refused = append(refused, i)
			case known || p.Value() > 0: // of a page that is not known here nothing need be forgotten
				c.Pairs[p.Page] = old.Merge(p.Pair)
			}
		}
		c.Cursor = b.To
	}
	if b.Complete && b.To == c.Cursor && !c.Done {
		c.Done = true
		c.Floor = max(c.Floor, b.Floor)
	}
	a := c.ack(Merged)
	a.Refused = refused
	return a
}

func (c *Copy) ack(s Status) Ack {
	return Ack{Status: s, Log: c.Log, Cursor: c.Cursor, High: max(c.High, c.Floor), Done: c.Done}
}

// Value is the number of the region's users on the page.
func (c *Copy) Value(page string) int64 {
	if p := c.Pairs[page]; p.Incarnation >= c.Floor {
		return p.Value()
	}
	return 0
}
