package fanout

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"headcount/presence"
)

// sink is a Client that takes everything at once.
type sink struct {
	Subscriber
	writes int
}

func (s *sink) Busy() bool       { return false }
func (s *sink) Try([]byte) error { s.writes++; return nil }
func (s *sink) Close() error     { return nil }
func (s *sink) Ping() bool       { return true }
func (s *sink) Expire()          {}

// asCount is an Encoder that writes a short text.
type asCount struct{}

func (asCount) Encode(b []byte, u presence.Update, _ Form) ([]byte, uint64) {
	return append(append(b, u.Value...), u.Key...), 0
}

func benchHub(b *testing.B) *Hub {
	b.Helper()
	h := New(Config{Shards: 1, Interval: time.Nanosecond, Budget: 1e12, Ping: time.Minute, Pong: time.Minute})
	h.Deliver(presence.KindCount, asCount{})
	return h
}

// BenchmarkUpdate measures one update of a topic that is written to all its subscribers.
func BenchmarkUpdate(b *testing.B) {
	for _, subscribers := range []int{1, 100, 10_000} {
		b.Run(strconv.Itoa(subscribers), func(b *testing.B) {
			h, topic := benchHub(b), presence.CountTopic("p")

			s, all := h.shards[0], make([]sink, subscribers)
			for i := range all {
				h.Prepare(&all[i].Subscriber, &all[i], 0)
				all[i].Enter()
				all[i].Subscribe([]presence.Topic{topic}, 0)
			}

			h.topics[topic].endpoint = attached // there is no store that would attach it
			b.ReportAllocs()

			sequence := uint64(0)
			for b.Loop() {
				sequence++
				h.Update(presence.Update{
					Topic: topic, Version: presence.Version{Incarnation: 1, Sequence: sequence}, Value: "17 0",
				})
				s.topics[topic].scanned = 0 // no pause between two updates
				s.topics[topic].scanAt = 1
				s.deliver()
			}

			if all[0].writes == 0 {
				b.Fatal("nothing was written")
			}
			b.ReportMetric(float64(all[0].writes)/float64(b.N), "writes/update")
		})
	}
}

// BenchmarkSubscribe measures a subscriber that wants a hundred topics and leaves them again.
func BenchmarkSubscribe(b *testing.B) {
	h := benchHub(b)
	topics := make([]presence.Topic, 100)
	for i := range topics {
		topics[i] = presence.CountTopic(fmt.Sprint("p", i))
	}
	c := &sink{}

	h.Prepare(&c.Subscriber, c, 0)
	c.Enter()

	b.ReportAllocs()
	for b.Loop() {
		c.Subscribe(topics, 0)
		for _, t := range topics {
			c.Unsubscribe(t)
		}
		h.shards[0].deliver()
	}
}

// BenchmarkNumbers measures the delivery of a number to each of a thousand subscribers.
func BenchmarkNumbers(b *testing.B) {
	h := benchHub(b)
	h.cfg.Numbers = digits{}
	all := make([]sink, 1000)

	for i := range all {
		h.Prepare(&all[i].Subscriber, &all[i], 0)
		all[i].Enter()
	}

	b.ReportAllocs()
	n := int64(0)
	for b.Loop() {
		n++
		for i := range all {
			all[i].SendUnread(n, true)
		}
		h.shards[0].deliver()
	}
}

// digits is a NumberEncoder.
type digits struct{}

func (digits) AppendNumber(b []byte, n int64) []byte { return strconv.AppendInt(b, n, 10) }
