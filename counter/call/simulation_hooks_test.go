package call_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/rows"
	"headcount/presence"
	"headcount/webhook"
	"headcount/webhook/webhookmem"
	"headcount/webhook/webhooktest"
)

// Webhooks in a simulation: their store, the server that receives their messages, and the check of what it received.
// Each life of a gateway judges the counters that it has changed, and one gateway sends the events.

const (
	simSettle   = 2 * time.Second   // webhook-settle
	simPatience = 150 * time.Second // how long a message may take, after failed attempts
)

// Thresholds that counters often pass.
const (
	simSums   = 15
	simStocks = 30
)

// simHooks has a hook for each kind of counters.
var simHooks = sync.OnceValue(func() []*webhook.Hook {
	hooks, err := webhook.Parse([]string{
		fmt.Sprintf("counter:%s>%d=http://receiver.test/sums", simSum.Match, simSums),
		fmt.Sprintf("counter:%s>%d=http://receiver.test/stocks", simStock.Match, simStocks),
	}, []presence.Site{presence.DefaultSite})
	if err != nil {
		panic(err)
	}

	return hooks
})

// hookOf returns the index of a counter's hook.
func hookOf(key string) int {
	if ruleOf(key) == simSum {
		return 0
	}

	return 1
}

// simBuckets has all buckets, which the one sending process owns.
var simBuckets = sync.OnceValue(func() (buckets []int) {
	for _, h := range simHooks() {
		buckets = append(buckets, presence.Bucket(h.ID, presence.DefaultBuckets))
	}

	return buckets
})

// subject is a counter with a threshold.
type subject struct {
	key   string
	limit int64
}

// moment is a value that a counter once had.
type moment struct {
	counter.Counter
	by *life // the life that got this answer; nil: a read
}

// hooked is what the gateways' webhooks share.
type hooked struct {
	s *simulation

	mu       sync.Mutex // guards the fields below
	store    *webhookmem.Store
	away     bool                // nobody reaches the store
	lostAt   time.Time           // when the store was emptied last
	past     map[string][]moment // by key
	late     map[string]bool     // events that were stored long after their counter was read
	messages *webhooktest.Messages
	told     map[subject]webhook.Event // the newest event
}

func newHooked(s *simulation) *hooked {
	return &hooked{
		s: s, store: webhookmem.New(), past: map[string][]moment{}, late: map[string]bool{},
		messages: webhooktest.NewMessages(s.Failf), told: map[subject]webhook.Event{},
	}
}

// isNow notes the value of a counter.
func (h *hooked) isNow(c counter.Counter, by *life) {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.past[c.Key] = append(h.past[c.Key], moment{c, by})
}

// lose empties the store.
func (h *hooked) lose() {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.store = webhookmem.New()
	h.lostAt = time.Now()
}

// note notes that a change has reached the store of webhooks.
func (h *hooked) note(by *life, c *webhook.Change) {
	if c.Was == c.Is {
		return
	}
	h.s.Logf("%s reports %s: %q becomes %q, %s", by.name, c.Subject, c.Was, c.Is, c.Event)
	if c.Event == "" {
		return
	}

	var e webhook.Event
	if err := json.Unmarshal([]byte(c.Event), &e); err != nil {
		h.s.Failf("–", "an event is %s, %v", c.Event, err)
	}

	h.mu.Lock()
	defer h.mu.Unlock()

	// Two processes that are so slow may report the same passing twice: once before and once after a fall.
	if time.Since(e.Timestamp) >= simSettle/2 {
		h.late[e.ID] = true
	}
}

// now returns the present store, and whether it is away.
func (h *hooked) now() (store *webhookmem.Store, away bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	return h.store, h.away
}

func (h *hooked) setAway(is bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.away = is
}

// wasLostLocked reports whether the store has lost this event, or the counter's value at that time.
func (h *hooked) wasLostLocked(e webhook.Event) bool {
	lostAt := h.lostAt
	// A counter whose value was lost falls back until its owner has healed it, and such a fall is in no answer.
	if healed := h.s.world.lostAt().Add(simHeal); healed.After(lostAt) {
		lostAt = healed
	}

	return !lostAt.Before(e.Timestamp)
}

// receive takes a message, and checks what holds for every message.
func (h *hooked) receive(id, body string) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for _, e := range h.messages.Take(id, body) {
		h.eventLocked(e)
	}
}

// eventLocked takes a new event: its counter had that value, at or over the threshold, and was below it since the last
// event.
func (h *hooked) eventLocked(e webhook.Event) {
	h.s.Logf("the receiver is told: %s is %d, over %d, version %s", e.Counter, *e.Value, *e.Threshold, e.Version)
	of := subject{e.Counter, *e.Threshold}
	last, again := h.told[of]
	h.told[of] = e

	to, _ := presence.ParseVersion(e.Version)
	isTrue := func(m moment) bool { return m.Version == to && m.Value == *e.Value && m.Value > of.limit }
	if !slices.ContainsFunc(h.past[e.Counter], isTrue) {
		h.s.Failf("–", "%s is told as %d, over %d, of version %s, which it never was",
			e.Counter, *e.Value, of.limit, e.Version)
	}

	isLate := h.late[last.ID] || h.late[e.ID]
	if !again || isLate || h.wasLostLocked(last) {
		return
	}

	from, _ := presence.ParseVersion(last.Version)
	isBelow := func(m moment) bool {
		return m.Value <= of.limit && m.Version.Compare(from) > 0 && m.Version.Compare(to) < 0
	}
	if !slices.ContainsFunc(h.past[e.Counter], isBelow) {
		h.s.Failf("once", "%s is told as over %d at %s and again at %s, and was not below in between",
			e.Counter, of.limit, last.Version, e.Version)
	}
}

// life is one life of a gateway.
type life struct {
	simtest.Host
	s      *simulation
	name   string
	caller *call.Caller
	hooks  *webhook.Service
	end    context.CancelFunc
}

// live begins a life of a gateway.
func (s *simulation) live(gateway, number int) (*life, context.Context) {
	ctx, end := context.WithCancel(context.Background())
	l := &life{s: s, name: fmt.Sprint("gateway ", gateway, ".", number), end: end}
	l.caller = call.New(s, call.Config{Stream: l.name})
	l.hooks = webhook.New(webhook.Config{
		Hooks: simHooks(), Keys: [][]byte{[]byte("the secret of a receiver")}, Store: outbox{l}, Counters: l,
		Settle: simSettle, Transport: l,
	})
	s.hooking.Go(func() { l.hooks.Run(ctx) })

	// If this gateway sends the events, its new life goes on with that. Otherwise none would be sent until another
	// fault.
	s.mu.Lock()
	defer s.mu.Unlock()

	s.lives[gateway] = l
	if s.sender == gateway {
		l.hooks.Serve(simBuckets())
	}

	return l, ctx
}

func (l *life) kill() {
	l.s.Logf("%s is killed", l.name)
	l.Die()
	l.end()
}

// sendFrom makes another gateway send the events.
func (s *simulation) sendFrom(gateway int) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.sender = gateway
	for i, l := range s.lives {
		if i == gateway {
			l.hooks.Serve(simBuckets())
		} else {
			l.hooks.Serve(nil)
		}
	}
}

// hookFault makes something go wrong with webhooks, until end is called.
func (s *simulation) hookFault() (end func()) {
	g := s.rand.Below(simGateways)
	s.mu.Lock()
	l := s.lives[g]
	s.mu.Unlock()

	switch s.rand.Below(6) {
	case 0, 1:
		s.Fault("a gateway stands still: %s", l.name)
		l.Suspend()
		return l.Resume
	case 2:
		s.Fault("gateway %d sends the events of webhooks", g)
		s.sendFrom(g)
	case 3:
		s.Fault("the store of webhooks is emptied")
		s.hooked.lose()
	case 4:
		s.Fault("the store of webhooks is away")
		s.hooked.setAway(true)
		return func() { s.hooked.setAway(false) }
	}

	return func() {}
}

// Read implements webhook.Counters.
func (l *life) Read(ctx context.Context, keys []string, _ string, _ time.Duration) ([]counter.Reading, error) {
	dice := l.s.dice(l.name, "reads", 0)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if !l.Alive() || dice.Chance(l.s.chances().store) {
		return nil, counter.ErrUnavailable
	}

	store, away := l.s.world.now()
	if away {
		return nil, counter.ErrUnavailable
	}
	found, err := owner.NewReader(store, rows.PartitionOf).Read(ctx, keys, "", 0)
	for i := range found {
		l.s.hooked.isNow(found[i].Counter, nil)
	}

	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if !l.Alive() {
		return nil, counter.ErrUnavailable
	}

	return found, err
}

var errTimedOut = errors.New("the receiver does not answer")

// RoundTrip implements http.RoundTripper. An attempt may be refused, may arrive without an answer, or may not arrive.
func (l *life) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}

	dice := l.s.dice(l.name, "sends to "+req.URL.Path, 0)
	time.Sleep(dice.UpTo(20 * time.Millisecond))
	if !l.Alive() {
		return nil, syscall.ECONNRESET
	}

	// 4 is success. One of the ways to fail lets the message arrive and loses its answer, so the sender repeats a
	// message that was received.
	luck := 4
	if dice.Chance(l.s.chances().receiver) {
		luck = dice.Below(4)
	}
	switch luck {
	case 0:
		return nil, syscall.ECONNREFUSED
	case 1:
		return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: http.NoBody, Request: req}, nil
	case 2:
		<-req.Context().Done()
		return nil, errTimedOut
	}

	l.s.hooked.receive(req.Header.Get("Webhook-Id"), string(body))
	if luck == 3 || !l.Alive() {
		return nil, syscall.ECONNRESET
	}

	return &http.Response{StatusCode: http.StatusNoContent, Body: http.NoBody, Request: req}, nil
}

// checkHooks checks webhooks when nothing else happens: what is reported is true, and when all counters fall, stay low
// and rise, there is one more event about each of them.
func (s *simulation) checkHooks() {
	// A change whose process was killed has not been judged, so its counter changes once more. So does a counter whose
	// report was lost with the store of webhooks.
	for i, key := range s.keys {
		c := s.counter(key)
		if !s.hooked.isJudged(c) {
			s.changeAtRest(s.lives[i%simGateways], key, 1)
		}
	}

	s.truth("after faults", simPatience, func(of subject, c counter.Counter, last webhook.Event) bool {
		return c.Value <= of.limit || last.Value != nil
	})

	for i, key := range s.keys {
		value := s.counter(key).Value
		s.changeAtRest(s.lives[i%simGateways], key, cmp.Or(-value, 1))
	}

	// The life that judges this fall is killed before the fall settles: the next life has to notice it.
	time.Sleep(simSettle / 2)
	s.lives[0].kill()
	s.live(0, 1000)
	s.truth("after a fall", 5*simSettle, nil)

	// A change that cannot be judged at once is judged later.
	s.hooked.setAway(true)
	for i, key := range s.keys {
		s.changeAtRest(s.lives[(i+1)%simGateways], key, 100)
	}

	time.Sleep(time.Second)
	s.hooked.setAway(false)
	s.truth("after a rise", simPatience, func(_ subject, c counter.Counter, last webhook.Event) bool {
		return last.Version == c.Version.String()
	})
}

// truth waits until what is reported is true, and the receiver's events are as they should be.
func (s *simulation) truth(when string, most time.Duration, isTold func(subject, counter.Counter, webhook.Event) bool) {
	// The pauses between attempts grow, so after failures a message may take a while.
	wrong := s.wrong(isTold)
	for end := time.Now().Add(most); wrong != "" && time.Now().Before(end); {
		time.Sleep(time.Second)
		wrong = s.wrong(isTold)
	}
	if wrong != "" {
		s.Failf("newest", "the receiver of webhooks %s: %s", when, wrong)
	}
}

// wrong returns what is reported or received wrongly; empty if all is right.
func (s *simulation) wrong(isTold func(subject, counter.Counter, webhook.Event) bool) string {
	for i, h := range simHooks() {
		store, _ := s.hooked.now()
		reported, _ := store.Reported(context.Background(), h.ID)
		for _, key := range s.keys {
			if hookOf(key) != i {
				continue
			}
			of := subject{key, []int64{simSums, simStocks}[i]}
			c := s.counter(key)
			last := s.hooked.last(of)

			isReported := reported[key] != ""
			if isReported != (c.Value > of.limit) {
				return fmt.Sprintf("%s is %d, %v, told as over %d: %t", key, c.Value, c.Version, of.limit, isReported)
			}
			if isTold != nil && !isTold(of, c, last) {
				return fmt.Sprintf("%s is %d, %v, last told as over %d: %+v", key, c.Value, c.Version, of.limit, last)
			}
		}
	}

	return ""
}

// changeAtRest makes a change and waits for its answer.
func (s *simulation) changeAtRest(l *life, key string, delta int64) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	s.Logf("%s adds %d to %s", l.name, delta, key)
	op := counter.Op{Changes: []counter.Change{{Key: key, Rule: ruleOf(key), Verb: counter.Add, Delta: delta}}}
	if _, err := l.do(ctx, key, op); err != nil {
		s.Failf("newest", "at rest %s is not changed: %v", key, err)
	}
}

// counter returns a counter as it is in the store.
func (s *simulation) counter(key string) counter.Counter {
	store, _ := s.world.now()
	read, err := owner.NewReader(store, rows.PartitionOf).Read(context.Background(), []string{key}, "", 0)
	if err != nil {
		s.Failf("newest", "%v", err)
		return counter.Counter{}
	}

	return read[0].Counter
}

// isJudged reports whether the change to a counter's present value was judged by a process that lives, and the store of
// webhooks has lost nothing since.
func (h *hooked) isJudged(c counter.Counter) bool {
	h.mu.Lock()
	defer h.mu.Unlock()

	isIts := func(m moment) bool { return m.Version == c.Version && m.by != nil && !m.by.IsDead() }

	return slices.ContainsFunc(h.past[c.Key], isIts) && c.Updated.After(h.lostAt)
}

// last returns the newest event about a subject that the receiver has.
func (h *hooked) last(of subject) webhook.Event {
	h.mu.Lock()
	defer h.mu.Unlock()

	return h.told[of]
}

// do makes one operation, and lets webhooks judge its counters.
func (l *life) do(ctx context.Context, key string, op counter.Op) (owner.Answer, error) {
	answer, err := l.caller.Do(ctx, owner.Call{Partition: rows.PartitionOf(key), Ops: []counter.Op{op}})
	if !l.Alive() && err == nil {
		err = counter.ErrUnavailable // its clients get no answer
	}
	if err != nil {
		return answer, err
	}

	for _, result := range answer.Results {
		for _, c := range result.Counters {
			l.s.hooked.isNow(c, l)
		}
	}
	l.hooks.Changed(answer.Results)

	return answer, nil
}

// outbox is how one life of a gateway uses the store of webhooks.
type outbox struct{ *life }

// use makes a call to the store. A call may get lost, arrive a while later, or lose its answer.
func (o outbox) use(what string, do func(*webhookmem.Store)) error {
	dice := o.s.dice(o.name, what, 0)
	chance := o.s.chances().store
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if dice.Chance(chance) {
		time.Sleep(dice.UpTo(2 * time.Second))
	}
	if !o.Alive() || dice.Chance(chance) {
		return webhook.ErrUnavailable
	}

	store, away := o.s.hooked.now()
	if away {
		return webhook.ErrUnavailable
	}
	do(store)

	if !o.Alive() || dice.Chance(chance) {
		return webhook.ErrUnavailable // the answer is lost
	}

	return nil
}

// Report implements webhook.Store.
func (o outbox) Report(
	ctx context.Context, changes []webhook.Change,
) (reported []string, dropped int, err error) {
	err = o.use("reports", func(s *webhookmem.Store) {
		for i := range changes {
			o.s.hooked.note(o.life, &changes[i])
		}
		reported, dropped, _ = s.Report(ctx, changes) // in memory nothing fails
	})
	if err != nil {
		return nil, 0, err
	}

	return reported, dropped, nil
}

// Reported implements webhook.Store.
func (o outbox) Reported(ctx context.Context, hook string) (states map[string]string, err error) {
	err = o.use("looks through", func(s *webhookmem.Store) { states, _ = s.Reported(ctx, hook) })
	if err != nil {
		return nil, err
	}

	return states, nil
}

// Take implements webhook.Store.
func (o outbox) Take(ctx context.Context, hook string) (events []string, waiting int, err error) {
	err = o.use("takes "+hook, func(s *webhookmem.Store) { events, waiting, _ = s.Take(ctx, hook) })
	if err != nil {
		return nil, 0, err
	}

	return events, waiting, nil
}

// Acknowledge implements webhook.Store.
func (o outbox) Acknowledge(ctx context.Context, hook, first string, n int) error {
	return o.use("takes "+hook, func(s *webhookmem.Store) { _ = s.Acknowledge(ctx, hook, first, n) })
}
