package webhook

import "github.com/prometheus/client_golang/prometheus"

// Metrics are those of a process. Hooks have no names: hosts of URLs are their labels.
type metrics struct {
	events, sent, failed, dropped, left *prometheus.CounterVec
	waiting                             *prometheus.GaugeVec
}

// Reasons why events are dropped.
const (
	dropFull    = "full"    // the outbox had MaxQueue
	dropOld     = "old"     // nobody took them for MaxAge
	dropRefused = "refused" // the receiver does not want them
)

func newMetrics(reg prometheus.Registerer) metrics {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	m := metrics{
		events:  counter("headcount_webhook_events_total", "Events put into an outbox by this process, by type.", "type"),
		sent:    counter("headcount_webhook_messages_total", "Messages that the receiver took, by host.", "host"),
		failed:  counter("headcount_webhook_failures_total", "Messages that the receiver did not take; they are sent again, but those that it refuses.", "host"),
		dropped: counter("headcount_webhook_dropped_total", "Events that were dropped: the outbox was full, they were too old, or the receiver refused them.", "reason"),
		left:    counter("headcount_webhook_left_out_total", "Changes of pages or counters that were not looked at, because too many changed at once; the next change of each is.", "kind"),
		waiting: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "headcount_webhook_waiting", Help: "Events in the outboxes that this process sends, by host."}, []string{"host"}),
	}
	for _, why := range []string{dropFull, dropOld, dropRefused} {
		m.dropped.WithLabelValues(why) // from 0 on: of a series that begins with 1 Prometheus sees no increase
	}
	if reg != nil {
		reg.MustRegister(m.events, m.sent, m.failed, m.dropped, m.left, m.waiting)
	}
	return m
}
