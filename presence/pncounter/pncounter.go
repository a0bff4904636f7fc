// Package pncounter has the messages of the counter that regions share. It has one pair of
// increments and decrements for each page and region, and only that region writes the pair.
// Copies of pairs travel between regions; they may be lost, repeated and reordered, and merging
// them in any order gives the same value. scripts/merge.lua merges them.
package pncounter

import "errors"

// Pair is one region's part of a page's counter. A region that never had a user there has
// the zero Pair.
type Pair struct {
	// Incarnation grows whenever the region forgot the page or lost its data: a pair
	// of a higher incarnation replaces any of a lower one.
	Incarnation uint64
	Increments  int64 // users who came in this incarnation
	Decrements  int64 // users who left in this incarnation
}

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
	// receiver's for the page: their region must give them a higher incarnation. Until then
	// Cursor does not pass the batch, so pairs whose refusal is lost are refused again.
	Refused []int
	Err     error
}
