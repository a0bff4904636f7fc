package node

import (
	"github.com/prometheus/client_golang/prometheus"

	"headcount/presence"
)

// Stats returns the node's figures.
func (n *Node) Stats() presence.NodeStats {
	return presence.NodeStats{Users: n.users.Load(), Partitions: n.owned(), Changes: n.written.Load()}
}

// owned is the number of partitions whose actor runs here.
func (n *Node) owned() int64 {
	owned := int64(0)
	for i := range n.actors {
		if n.actors[i].Load() != nil {
			owned++
		}
	}

	return owned
}

func (n *Node) collectors() []prometheus.Collector {
	counter := func(name, help string, value func() int64) prometheus.Collector {
		opts := prometheus.CounterOpts{Name: name, Help: help}
		return prometheus.NewCounterFunc(opts, func() float64 { return float64(value()) })
	}
	gauge := func(name, help string, value func() int64) prometheus.Collector {
		opts := prometheus.GaugeOpts{Name: name, Help: help}
		return prometheus.NewGaugeFunc(opts, func() float64 { return float64(value()) })
	}

	return []prometheus.Collector{
		n.batches,
		gauge("headcount_users", "Users present on any page, of the partitions owned here.", n.users.Load),
		gauge("headcount_partitions_owned", "Partitions that this process owns.", n.owned),
		counter("headcount_beats_dropped_total",
			"Messages of gateways dropped because a partition's mailbox was full; the gateways repeat them.",
			n.dropped.Load),
		counter("headcount_suspensions_total", "Suspensions of the process, by which session deadlines were extended.",
			n.suspensions.Load),
		counter("headcount_store_changes_total", "Partition changes written to the store.", n.written.Load),
		counter("headcount_counts_published_total",
			"Counts of pages written to the store, which publishes those whose total changed.",
			n.counts.Load),
		counter("headcount_takeovers_total", "Partitions that this node took over, including those at its start.",
			n.claimed.Load),
		counter("headcount_fenced_writes_total",
			"Partition changes refused by the store because another node owns the partition.",
			n.fenced.Load),
		counter("headcount_heartbeats_missing_total",
			"Questions to gateways about users whose heartbeats were missing.",
			n.asked.Load),
		counter("headcount_sessions_silent_total",
			"Sessions that ended because neither a heartbeat nor a leave arrived.",
			n.endedSilent.Load),
		counter("headcount_store_failures_total", "Partition changes that were not written at the first attempt.",
			n.failures.Load),
	}
}

func newBatches() prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "headcount_store_batch_changes",
		Help:    "Partition changes in one call to the store.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 10),
	})
}
