package main

import (
	"slices"
	"sync"

	"headcount/counter/counterredis"
	"headcount/presence"
	"headcount/presence/member"
	"headcount/presence/ring"
)

// owner says which buckets of counters are this process's, among the gateways that live: they
// alone keep counters. Buckets go to them as buckets of pages go to dispatchers. Its methods
// may be called from any goroutine.
type owner struct {
	member *member.Member
	self   string

	mu    sync.Mutex // guards all below
	among []string
	table *ring.Table
}

// Owns implements hot.Owner. While no leases are known it is nobody's.
func (o *owner) Owns(bucket int) bool {
	var gateways []string
	for _, p := range o.member.Members() {
		if slices.Contains(p.Roles, presence.RoleGateway) {
			gateways = append(gateways, p.Name)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.table == nil || !slices.Equal(gateways, o.among) {
		table, err := ring.New(nil, gateways, 1, counterredis.Buckets)
		if err != nil { // members without a name; the next list has none
			return false
		}
		o.among, o.table = gateways, table
	}
	is, ok := o.table.Dispatcher(bucket)
	return ok && is == o.self
}
