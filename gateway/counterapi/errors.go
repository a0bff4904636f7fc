package counterapi

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

// Errors about bodies.
var (
	errTooLong = calls.Refuse(calls.ErrTooLarge, "A body has at most 262144 bytes; send the rest in another call.")
	errNotJSON = calls.Refuse(calls.ErrMedia, "The body must be JSON; send the header Content-Type: "+
		"application/json, or none.")
	errCompressed  = calls.Refuse(calls.ErrMedia, "The body may not be compressed; send it without Content-Encoding.")
	errLargeBodies = calls.Refuse(calls.ErrBodies,
		"Too many large bodies of callers without API key are being read; send less than 4096 bytes, or try again.")
)

// why returns the text of an error without the text of the sentinel with which it begins.
func why(err, sentinel error) string { return strings.TrimPrefix(err.Error(), sentinel.Error()+": ") }

// badKey refuses an invalid key of a counter, limit or list.
func badKey(thing, fits string, err error) error {
	return calls.Bad("This cannot be the key of a " + thing + ": " + why(err, counter.ErrKey) +
		". Send 1 to 128 characters without control characters and *, percent-encoded" + fits + ".")
}

func badCounter(err error) error { return badKey("counter", ", that fit a rule", err) }

func badBody(err error) error {
	return calls.Bad("The body cannot be used: " + why(err, counter.ErrBody) + ".")
}

// notPublic refuses a call that needs an API key.
func notPublic(because string) error {
	return calls.Refuse(calls.ErrNotPublic, "This call on this counter is not public"+because+
		"; send an API key in the header "+httppolicy.APIKeyHeader+", or open it in the rule of the counter.")
}

// misfit refuses a question that the counter cannot answer because of its kind or rule.
func misfit(one call, value int64, detail string) error {
	return calls.Refuse(&counter.Conflict{Is: counter.ErrKind, Key: one.key, Value: value}, detail)
}

// crowded refuses a question because too many are being answered.
func (a *API) crowded() error {
	a.metrics.crowded.Inc()

	return calls.Refuse(calls.ErrRate, "Too many questions about the history of counters are being answered, "+
		"of this address or of all; ask again later.", httppolicy.RetryAfter(calls.ComeBack))
}

// failed returns the error for a call that the store did not carry out.
func (a *API) failed(c *gin.Context, err error) error {
	detail := "The store of counters cannot be reached now; try again."
	switch {
	case errors.Is(err, counter.ErrBusy):
		// This alone says for certain that nothing was changed.
		detail = "Too many changes are waiting, and this one was not made; send it again."
	case !calls.Reads(c.Request):
		detail = "The store of counters cannot be reached now. The change was not made, or it is unknown whether " +
			"it was; " +
			"send it again with the same Idempotency-Key."
	}

	return a.unavailable(err, detail)
}

// unavailable refuses a call with 503 whatever err is.
func (a *API) unavailable(err error, detail string) error {
	var other *counter.FormatError
	// Waiting does not help then, and the operator has to know why.
	if errors.As(err, &other) {
		detail = "No counters are served: " + other.Error() + "."
	}

	a.metrics.unavailable.Inc()

	return calls.Refuse(fmt.Errorf("%w: %w", calls.ErrUnavailable, err), detail)
}

// logKind logs, once per rule, that the kind of an existing counter differs from that of its rule.
func (a *API) logKind(rule *counter.Rule) {
	a.mu.Lock()
	defer a.mu.Unlock()

	if a.differs[rule] {
		return
	}

	a.differs[rule] = true
	a.cfg.Log.Warn().Str("match", rule.Written()).Stringer("kind", rule.Kind).
		Msg("counters: a counter of this rule was made as another kind and keeps that kind; calls that only the " +
			"rule's kind has are refused. Delete such counters, or give the rule its former kind. This is logged " +
			"once for each rule")
}
