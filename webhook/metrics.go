package webhook

import "github.com/prometheus/client_golang/prometheus"

// metrics are the metrics of a process. Hooks have no names, so their labels are the hosts of their URLs, and their
// numbers where one that fails must not be hidden by another one of its host.
type metrics struct {
	events, sent, failed, dropped, left *prometheus.CounterVec
	waiting                             *prometheus.GaugeVec
}

// Reasons why events are dropped.
const (
	dropFull    = "full"    // the outbox had MaxQueue events
	dropOld     = "old"     // the receiver did not accept them for MaxAge
	dropRefused = "refused" // the receiver refused them
	dropSealed  = "sealed"  // no key opens the ids of their users
)

func newMetrics(reg prometheus.Registerer) metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}

	m := metrics{
		events: counter("headcount_webhook_events_total", "Events put into an outbox by this process, by type.",
			"type"),
		sent: counter("headcount_webhook_messages_total", "Messages that the receiver accepted, by host and number of "+
			"the --webhook.", "host", "webhook"),
		failed: counter("headcount_webhook_failures_total", "Messages that the receiver did not accept, by host and "+
			"number of the --webhook; they are sent again, unless the receiver refused them.", "host", "webhook"),
		dropped: counter("headcount_webhook_dropped_total", "Events dropped, by reason: full (outbox), "+
			"old (not accepted for a day), refused (by the receiver), sealed (users, with a secret that is gone).",
			"reason"),
		left: counter("headcount_webhook_left_out_total", "Changes of pages, users or counters left out because "+
			"too many changed at once; the next change of each is not.", "kind"),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "headcount_webhook_waiting", Help: "Events in the outboxes that this process sends, by host.",
		}, []string{"host"}),
	}
	for _, why := range []string{dropFull, dropOld, dropRefused, dropSealed} {
		m.dropped.WithLabelValues(why) // exported from 0 on: Prometheus sees no increase in a series that begins with 1
	}

	if reg != nil {
		reg.MustRegister(m.events, m.sent, m.failed, m.dropped, m.left, m.waiting)
	}

	return m
}
