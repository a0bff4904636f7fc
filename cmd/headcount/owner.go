package main

import (
	"slices"
	"sync"

	"headcount/counter/counterredis"
	"headcount/presence"
	"headcount/presence/member"
	"headcount/presence/ring"
)

// owner decides which buckets of counters this process owns. Only gateways keep counters, so the
// buckets are distributed among the live gateways in the same way as the buckets of pages among
// dispatchers. Its methods may be called from any goroutine.
type owner struct {
	member *member.Member
	self   string

	mu       sync.Mutex // guards all below
	gateways []string   // the members of table
	table    *ring.Table
}

// Owns implements counterredis.Owner. While no leases are known, the process owns no bucket.
func (o *owner) Owns(bucket int) bool {
	var gateways []string
	for _, p := range o.member.Members() {
		if slices.Contains(p.Roles, presence.RoleGateway) {
			gateways = append(gateways, p.Name)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.table == nil || !slices.Equal(gateways, o.gateways) {
		o.gateways, o.table = gateways, ring.New(nil, gateways, 1, counterredis.Buckets)
	}
	is, ok := o.table.Dispatcher(bucket)
	return ok && is == o.self
}
