package pncounter

import "errors"

// PagePair is a page's pair.
type PagePair struct {
	Page string
	Pair
}

// ErrRefused is wrapped by every error about a peer with which this region must not share
// counts. The text gives the reason.
var ErrRefused = errors.New("the peer is refused")

// Regions is what a region knows about itself and the other regions.
type Regions struct {
	Identity string            // of this region; empty: it has none yet
	Words    map[string]string // the last word of each region, which changes with every greeting
	Out      []string          // the regions that totals leave out
}

// Position is how far a peer has one bucket of a region's log.
type Position struct {
	Bucket      int
	Log, Cursor uint64
	Done        bool // the peer has had the log up to its end once
}

// Batch is what a region sends to another region about one bucket. The region's log has
// every page of the bucket at the position of its last change. A batch has the pages that
// changed after From, up to To, with their current pairs. Batches may be lost, repeated
// and reordered.
type Batch struct {
	Region string // the region that the pairs belong to
	Bucket int
	// Log is the number of the bucket's log. A region that lost data begins another log at
	// position 0, whose number is above all incarnations that the region has used.
	Log      uint64
	From, To uint64
	// Floor is the lowest incarnation of the log's pairs. A pair with a lower incarnation
	// that the log does not name again belongs to a page without users.
	Floor uint64
	// Complete says that To is the end of the log, and that the log has all of
	// the region's pages.
	Complete bool
	// These are for the sender. More: the log goes on after To. Forgotten: the log has
	// forgotten a page after From; the batch is empty, and the region must begin a new log,
	// which voids the pairs that it does not name. Partial: the region has not written all
	// its users yet, and its pairs would replace better ones.
	More, Forgotten, Partial bool
	Pages                    []PagePair
}

// Status is what the receiver did with a batch.
type Status int

const (
	Merged  Status = iota // the batch is merged, or was known already
	Unready               // the receiver's bucket has no owner yet: send again later
	Behind                // the receiver knows higher incarnations of the region: begin a log above Ack.High
	Gap                   // earlier batches are missing: send from Ack.Cursor on
	Failed                // the receiver's bucket cannot be used; Ack.Err says why
)

// Ack is the reply to a batch. It says what the receiver has now.
type Ack struct {
	Status Status
	Log    uint64 // the log that the receiver has, or the batch's
	Cursor uint64 // the receiver has the log up to here
	// High is the highest incarnation of the region that the receiver knows. A log that
	// the region begins must have a number above it.
	High uint64
	// Done says that the receiver has had the log up to its end once.
	Done bool
	// Changed is the number of pages whose pair was new to the receiver. Malformed is
	// the number of pages whose data at the receiver could not be read; the receiver
	// has written them again.
	Changed, Malformed int
	// Refused has the indexes in Batch.Pages of pairs whose incarnation is below the
	// receiver's for the page: their region must give them a higher incarnation.
	Refused []int
	Err     error
}

// Copy is one region's copy of another region's bucket. Only tests use it: it defines what
// merge.lua must do. The zero Copy is empty. One goroutine at a time may use a Copy.
type Copy struct {
	Log, Cursor uint64
	Floor, High uint64
	Done        bool
	Pairs       map[string]Pair
}

// Merge merges a batch and returns the reply to it.
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
	if b.To > c.Cursor { // otherwise the copy has had all of the batch
		if c.Pairs == nil {
			c.Pairs = map[string]Pair{}
		}
		for i, p := range b.Pages {
			c.High = max(c.High, p.Incarnation)
			old, known := c.Pairs[p.Page]
			switch {
			case p.Incarnation < max(old.Incarnation, c.Floor):
				refused = append(refused, i)
			case known || p.Value() > 0: // an empty page that the copy does not know need not be stored
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

// Value returns the number of the region's users on the page.
func (c *Copy) Value(page string) int64 {
	if p := c.Pairs[page]; p.Incarnation >= c.Floor {
		return p.Value()
	}
	return 0
}
