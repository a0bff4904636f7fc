package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/setting"
	"headcount/internal/wake"
)

const (
	attemptTime = 10 * time.Second // for one message, with its answer
	maxAnswer   = 4 << 10          // bytes of an answer that are read, and ignored
	firstPause  = time.Second      // after a failure; doubled after each further one
	maxPause    = 5 * time.Minute
	pollEvery   = time.Second // between two reads of an empty outbox, into which other processes put events
)

// refusals are the statuses by which a receiver refuses a message for good.
var refusals = []int{
	http.StatusBadRequest, http.StatusGone, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
	http.StatusUnprocessableEntity,
}

// sender sends the events in the outbox of one hook, while this process owns the hook's bucket.
type sender struct {
	service *Service
	hook    *Hook
	owned   atomic.Bool
	wake    chan struct{} // holds one: the outbox may have events, or owned has changed

	// run owns these.
	failed  int // attempts in a row
	waiting int // events in the outbox, as the metric has them
}

// run sends batches until ctx ends. After a failure it pauses, twice as long after each further failure, up to
// maxPause, and repeats the batch until its events are older than MaxAge. Only the end of ctx ends a pause early.
func (o *sender) run(ctx context.Context) {
	s := o.service
	log := s.cfg.Log.With().Str("webhook", o.hook.Host).Int("number", o.hook.Number).Logger()

	var store failing
	for ctx.Err() == nil {
		if !o.owned.Load() {
			// Another process sends now, so nothing is known of the receiver.
			o.failed = 0
			// The owner shows the outbox now.
			o.showWaiting(0)
			wake.Wait(ctx, time.Minute, o.wake)
			continue
		}

		events, left, err := s.cfg.Store.Take(ctx, o.hook.ID)
		store.note(ctx, log, err)
		if err != nil || len(events) == 0 {
			o.showWaiting(0)
			wake.Wait(ctx, outage.Jitter(2*pollEvery), o.wake)
			continue
		}

		o.showWaiting(left)
		o.send(ctx, log, events)
	}
}

// labels returns the labels of the webhook's messages.
func (o *sender) labels() []string { return []string{o.hook.Host, strconv.Itoa(o.hook.Number)} }

// showWaiting sets how many events wait in the outbox. The webhooks of a host share the metric.
func (o *sender) showWaiting(events int) {
	o.service.metrics.waiting.WithLabelValues(o.hook.Host).Add(float64(events - o.waiting))
	o.waiting = events
}

// send sends events once and removes from the outbox what the receiver has accepted or refused for good. After any
// other answer it pauses.
func (o *sender) send(ctx context.Context, log zerolog.Logger, events []string) {
	if old := o.old(events); old > 0 {
		o.drop(ctx, events[:old], dropOld)
		log.Warn().Int("events", old).Msg("a webhook has accepted no events for a day; its oldest events were dropped")
		return
	}

	shown := events // to the receiver
	if o.hook.condition == attendance {
		shown = o.service.users.reveal(events)
	}
	if len(shown) == 0 {
		o.noteSealed(len(events))
		o.done(ctx, events)
		return
	}

	o.noteSending(events)

	var a attempt
	m, err := newMessage(shown)
	if err == nil {
		a, err = o.attempt(ctx, m)
	}
	if ctx.Err() != nil {
		return // whatever the receiver did, the batch is sent again under the same id
	}

	switch a.outcome(err) {
	case accepted:
		o.accepted(log)
		o.noteSealed(len(events) - len(shown))
		o.done(ctx, events)
	case refused:
		o.failed = 0
		o.service.metrics.failed.WithLabelValues(o.labels()...).Inc()
		log.Warn().Int("status", a.status).Int("events", len(events)).Msg("a webhook refused events; they were dropped")
		o.drop(ctx, events, dropRefused)
	case failed:
		pause := o.fail(log, a.status, err)
		outage.Sleep(ctx, max(pause, a.again))
	}
}

// outcome says what becomes of the events of an attempt.
type outcome int

const (
	accepted outcome = iota // they leave the outbox
	refused                 // for good: they are dropped
	failed                  // they are sent again
)

// outcome returns the outcome of an attempt that ended with err.
func (a attempt) outcome(err error) outcome {
	switch {
	case err != nil:
		return failed
	case a.status/100 == 2:
		return accepted
	case slices.Contains(refusals, a.status):
		return refused
	default:
		return failed
	}
}

// accepted notes that the receiver has accepted a message.
func (o *sender) accepted(log zerolog.Logger) {
	if o.failed > 0 {
		log.Info().Int("attempts", o.failed+1).Msg("a webhook accepts events again")
	}

	o.failed = 0
	o.service.metrics.sent.WithLabelValues(o.labels()...).Inc()
}

// fail notes an attempt that failed, and returns the pause before the next one.
func (o *sender) fail(log zerolog.Logger, status int, err error) time.Duration {
	o.service.metrics.failed.WithLabelValues(o.labels()...).Inc()
	o.failed++
	// Log only the first failure in a row, and without the URL, which may contain a secret.
	if o.failed == 1 {
		log.Warn().Err(setting.Cause(err)).Int("status", status).Msg("a webhook does not accept events; retrying")
	}

	return outage.Jitter(min(firstPause<<min(o.failed-1, 10), maxPause))
}

// old returns how many events at the beginning of a batch are older than MaxAge. Before an attempt has failed it
// returns 0, because all processes may have been away for that long, or the clock was set.
func (o *sender) old(events []string) (n int) {
	if o.failed == 0 {
		return 0
	}

	for i, text := range events {
		if o.hook.condition == attendance {
			text, _ = o.service.users.open(text)
		}

		var e Event
		err := json.Unmarshal([]byte(text), &e)
		switch {
		case err != nil: // no secret decrypts it, so its age is unknown
		case time.Since(e.Timestamp) > MaxAge:
			n = i + 1
		default:
			return n
		}
	}

	return n
}

// done removes the first events of a batch, or all, from the outbox. If that fails, the batch is sent again with the
// same id.
func (o *sender) done(ctx context.Context, events []string) {
	// The first event identifies the batch, so nothing else is removed if the batch was dropped meanwhile.
	err := o.service.cfg.Store.Acknowledge(ctx, o.hook.ID, events[0], len(events))
	if err != nil {
		outage.Sleep(ctx, outage.Jitter(firstPause))
		return
	}

	o.noteRemoved(events)
}

// noteSealed counts and logs events that are dropped because no secret decrypts them.
func (o *sender) noteSealed(events int) {
	if events == 0 {
		return
	}

	o.service.metrics.dropped.WithLabelValues(dropSealed).Add(float64(events))
	o.service.cfg.Log.Warn().Int("events", events).
		Msg("no --webhook-secret decrypts the users in events of a webhook; the events were dropped")
}

func (o *sender) drop(ctx context.Context, events []string, why string) {
	o.service.metrics.dropped.WithLabelValues(why).Add(float64(len(events)))
	o.done(ctx, events)
}

// message is a batch in the form in which it is sent. It depends on its events only, so each attempt has the
// same id and body.
type message struct {
	id   string
	body []byte
}

func newMessage(events []string) (m message, err error) {
	var last Event
	if err := json.Unmarshal([]byte(events[len(events)-1]), &last); err != nil {
		return m, err
	}

	b := append([]byte(`{"type":"events","timestamp":"`), last.Timestamp.Format(time.RFC3339Nano)...)
	b = append(b, `","data":{"events":[`...)
	b = append(b, strings.Join(events, ",")...)
	m.body = append(b, `]}}`...)

	// A frozen batch has the same body in every process, so the message has the same id. Another batch has another one,
	// also if its first event is the same: a store that comes back older may have forgotten how long a batch was.
	sum := sha256.Sum256(m.body)
	m.id = "msg_" + hex.EncodeToString(sum[:16])

	return m, nil
}

// Sign returns the header webhook-signature: a signature by each key, separated by spaces.
func Sign(keys [][]byte, id string, at int64, body []byte) string {
	var all []string
	// One for each key, so that a receiver can change to the new one at any time.
	for _, key := range keys {
		mac := hmac.New(sha256.New, key)
		fmt.Fprintf(mac, "%s.%d.", id, at)
		mac.Write(body)
		all = append(all, "v1,"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
	}

	return strings.Join(all, " ")
}

// attempt is the receiver's answer to a message.
type attempt struct {
	status int
	again  time.Duration // the pause that it asks for by Retry-After
}

// attempt sends a message once.
func (o *sender) attempt(ctx context.Context, m message) (a attempt, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.hook.URL, bytes.NewReader(m.body))
	if err != nil {
		return a, err
	}

	// The time of this attempt and not of the events, because receivers refuse old messages as replays.
	now := time.Now().Unix()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Headcount")
	req.Header.Set("Webhook-Id", m.id)
	req.Header.Set("Webhook-Timestamp", strconv.FormatInt(now, 10))
	req.Header.Set("Webhook-Signature", Sign(o.service.cfg.Keys, m.id, now, m.body))

	resp, err := o.service.client.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()

	a.status = resp.StatusCode
	// The client's time limit does not cover the body of a 101, which is the connection itself.
	if a.status != http.StatusSwitchingProtocols {
		_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer) // so that the connection can be reused
	}

	seconds, malformed := strconv.Atoi(resp.Header.Get("Retry-After"))
	if malformed == nil && seconds > 0 {
		// A receiver cannot put its events off for longer than failures do.
		a.again = min(time.Duration(seconds)*time.Second, maxPause)
	}

	return a, nil
}

// Check returns why the receiver of a hook would not get events. It sends no event. A receiver that only serves events
// may answer with any status under 500.
func Check(ctx context.Context, h *Hook) error {
	status, err := reach(ctx, h)
	fails := status >= 500 && status != http.StatusNotImplemented

	switch {
	case errors.As(err, new(*tls.CertificateVerificationError)):
		return fmt.Errorf("%s has a certificate that is not trusted here: %w; give the receiver one for its name by "+
			"an authority that this machine knows", h.Host, err)
	case err != nil:
		return fmt.Errorf("%s does not answer: %w; see whether the receiver runs, and whether this machine may reach "+
			"it", h.Host, err)
	case status/100 == 3:
		return fmt.Errorf("%s redirects (status %d), and redirects are not followed; name the URL to which it leads",
			h.Host, status)
	case fails:
		return fmt.Errorf("%s answers with status %d; see what is wrong there: events wait until it accepts them",
			h.Host, status)
	default:
		return nil
	}
}

// reach sends a HEAD request in the way that messages are sent, and returns the status of the answer.
func reach(ctx context.Context, h *Hook) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodHead, h.URL, nil)
	if err != nil {
		return 0, setting.Cause(err)
	}
	req.Header.Set("User-Agent", "Headcount")

	client := newClient(nil)
	defer client.CloseIdleConnections()

	resp, err := client.Do(req)
	if err != nil {
		return 0, setting.Cause(err)
	}

	return resp.StatusCode, resp.Body.Close()
}
