package presence

// Parts are what the count of a page, or of a site, is made of in a region. Each process knows some of them; Add joins
// what several processes know.
type Parts struct {
	People      int64 `json:"people"`      // users that are present
	Held        int64 `json:"held"`        // of them by a hold alone
	Leaving     int64 `json:"leaving"`     // those of them that have no connection any more and are in their grace
	Connections int64 `json:"connections"` // that joined; on a site once for each page that they joined
	Ignored     int64 `json:"ignored"`     // connections of crawlers, which are not counted

	// Settled are the partitions whose owner answered for all of their users, and has nothing to write. Moving says
	// that a connection has come or gone and the owner has yet to learn of it.
	Settled int  `json:"settled"`
	Moving  bool `json:"moving"`
}

// Add adds what another process knows.
func (p *Parts) Add(o Parts) {
	p.People += o.People
	p.Held += o.Held
	p.Leaving += o.Leaving
	p.Connections += o.Connections
	p.Ignored += o.Ignored
	p.Settled += o.Settled
	p.Moving = p.Moving || o.Moving
}
