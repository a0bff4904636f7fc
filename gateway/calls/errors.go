package calls

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/rs/zerolog"
	"golang.org/x/time/rate"

	"headcount/counter"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

// What refuses a call or a message, where no other package has an error for it.
var (
	ErrBad           = errors.New("the request cannot be used")
	ErrNotPublic     = errors.New("this is not public")
	ErrOtherSite     = errors.New("the page or the API key is of another site")
	ErrNobody        = errors.New("the caller has no identity")
	ErrNoKey         = errors.New("an API key is missing or wrong")
	ErrNotSigned     = errors.New("a signature of a back end is missing or wrong")
	ErrKeyWanted     = errors.New("this needs an API key, which a visitor does not have")
	ErrNotFound      = errors.New("there is no such path")
	ErrMethod        = errors.New("the path does not allow the method")
	ErrTooLarge      = errors.New("the body is too large")
	ErrMedia         = errors.New("the body is of another media type")
	ErrNoUpgrade     = errors.New("the path takes WebSockets only")
	ErrRate          = errors.New("too much for now")
	ErrUnavailable   = errors.New("the server cannot do this now")
	ErrBodies        = errors.New("too many large bodies are being read")
	ErrMessageType   = errors.New("there is no such message")
	ErrTooManyErrors = errors.New("too many messages of the connection were refused")
)

// ComeBack is the time after which a client may repeat a call that the server could not carry out.
const ComeBack = time.Second

// Challenges of a 401. A 401 without one of these has that of httppolicy.Problem.
const (
	wantsKey       = `API-Key realm="headcount"`
	wantsSignature = `Pusher realm="headcount"`
	// RFC 6750 has it only for a token that the client has sent.
	badToken = `Bearer realm="headcount", error="invalid_token"`
)

// Codes of error frames.
const (
	CodeBadJSON       = "bad_json"
	CodeBadType       = "bad_type"
	CodeBadPage       = "bad_page"
	CodeBadCounter    = "bad_counter"
	CodeForbidden     = "forbidden"
	CodeTooManyPages  = "too_many_pages"
	CodeTooLarge      = "too_large"
	CodeBinary        = "binary"
	CodeTooManyErrors = "too_many_errors"
	CodeRateLimited   = "rate_limited"
	CodeTokenExpired  = "token_expired"
)

// Codes are all of them.
var Codes = []string{
	CodeBadJSON, CodeBadType, CodeBadPage, CodeBadCounter, CodeForbidden, CodeTooManyPages, CodeTooLarge, CodeBinary,
	CodeTooManyErrors, CodeRateLimited, CodeTokenExpired,
}

// meaning is what an error means to a client.
type meaning struct {
	of        error
	status    int
	code      string        // of the error frame; empty: no message leads to the error
	reason    string        // of the refusal, where the status is not specific enough
	detail    string        // for the client, in place of an error's text that says nothing to it
	challenge string        // of a 401
	again     time.Duration // when to come back; 0: the refusal says that, or coming back is no use
	unread    bool          // the body is refused without being read
	malformed bool          // the store cannot be read until somebody deletes data, so the operator has to know
}

// meanings has the first row that fits an error. An error that no row fits is a defect.
var meanings = []meaning{
	{of: ErrBad, status: http.StatusBadRequest, code: CodeBadJSON},
	{of: ErrMessageType, status: http.StatusBadRequest, code: CodeBadType},
	{of: presence.ErrPage, status: http.StatusBadRequest, code: CodeBadPage},
	{of: presence.ErrTooMany, status: http.StatusBadRequest, code: CodeTooManyPages},
	{of: counter.ErrKey, status: http.StatusBadRequest, code: CodeBadCounter},

	{of: identity.ErrNoToken, status: http.StatusUnauthorized, reason: httppolicy.ReasonNoToken},
	{of: identity.ErrBadToken, status: http.StatusUnauthorized, code: CodeTokenExpired,
		reason: httppolicy.ReasonBadToken, challenge: badToken},
	{of: ErrNobody, status: http.StatusUnauthorized},
	{of: ErrNoKey, status: http.StatusUnauthorized, reason: httppolicy.ReasonAPIKey, challenge: wantsKey},
	{of: ErrNotSigned, status: http.StatusUnauthorized, reason: httppolicy.ReasonSignature, challenge: wantsSignature},
	{of: ErrKeyWanted, status: http.StatusUnauthorized, reason: httppolicy.ReasonAPIKey},

	{of: ErrNotPublic, status: http.StatusForbidden, code: CodeForbidden},
	{of: ErrOtherSite, status: http.StatusForbidden, reason: httppolicy.ReasonSite},

	{of: ErrNotFound, status: http.StatusNotFound},
	{of: ErrMethod, status: http.StatusMethodNotAllowed},

	{of: counter.ErrBound, status: http.StatusConflict},
	{of: counter.ErrOverflow, status: http.StatusConflict},
	{of: counter.ErrKind, status: http.StatusConflict},
	{of: counter.ErrReservation, status: http.StatusConflict},
	{of: counter.ErrNoReservation, status: http.StatusNotFound},

	{of: ErrTooLarge, status: http.StatusRequestEntityTooLarge, code: CodeTooLarge, unread: true},
	{of: ErrMedia, status: http.StatusUnsupportedMediaType, code: CodeBinary},
	{of: ErrNoUpgrade, status: http.StatusUpgradeRequired},
	{of: ErrRate, status: http.StatusTooManyRequests, code: CodeRateLimited},
	{of: ErrTooManyErrors, status: http.StatusTooManyRequests, code: CodeTooManyErrors},

	{of: counter.ErrMalformed, status: http.StatusServiceUnavailable, again: ComeBack, malformed: true},
	{of: presence.ErrMalformed, status: http.StatusServiceUnavailable, again: ComeBack, malformed: true},
	{of: ErrBodies, status: http.StatusServiceUnavailable, again: ComeBack, unread: true},
	{of: ErrUnavailable, status: http.StatusServiceUnavailable, again: ComeBack},
	{of: presence.ErrUnavailable, status: http.StatusServiceUnavailable, again: ComeBack},
	{of: counter.ErrUnavailable, status: http.StatusServiceUnavailable, again: ComeBack},
	{of: identity.ErrKeysAway, status: http.StatusServiceUnavailable, again: identity.KeysEvery},

	// The last ones, because an error that says what became of a change wraps one of these.
	{of: context.DeadlineExceeded, status: http.StatusServiceUnavailable, again: ComeBack, detail: lateDetail},
	{of: context.Canceled, status: http.StatusServiceUnavailable, again: ComeBack, detail: lateDetail},
}

const lateDetail = "The call was not carried out in its time. If it changes something, that may yet have been done."

// Its text may name anything, so the client gets none of it.
var defect = meaning{status: http.StatusInternalServerError, detail: httppolicy.DefectDetail}

// meaningOf returns the row of an error.
func meaningOf(err error) meaning {
	for _, m := range meanings {
		if errors.Is(err, m.of) {
			return m
		}
	}

	return defect
}

// CodeOf returns the code of the error frame about an error.
func CodeOf(err error) string { return meaningOf(err).code }

// Refusal is an error with a sentence for the client. The error that it wraps says what it means.
type Refusal struct {
	is      error
	detail  string
	options []httppolicy.Option
}

// Refuse returns a Refusal with a sentence, in place of the text of err, and further headers.
func Refuse(err error, detail string, options ...httppolicy.Option) *Refusal {
	return &Refusal{is: err, detail: detail, options: options}
}

// Bad returns the refusal of a request that cannot be used, with the status 400.
func Bad(detail string) *Refusal { return Refuse(ErrBad, detail) }

var errWrongKey = Refuse(ErrNoKey, "The API key in the header "+httppolicy.APIKeyHeader+
	" is wrong; send one of --api-key, or none for what is public.")

// Error returns the sentence.
func (r *Refusal) Error() string { return r.detail }

// Unwrap returns what the refusal means.
func (r *Refusal) Unwrap() error { return r.is }

// refuser answers calls with what errors mean.
type refuser struct {
	log       zerolog.Logger
	malformed rate.Sometimes // when malformed data is logged, since everybody may ask for it
}

// newRefuser returns a refuser that logs malformed data at most once a minute.
func newRefuser(log zerolog.Logger) *refuser {
	return &refuser{log: log, malformed: rate.Sometimes{First: 1, Interval: time.Minute}}
}

// WriteRefusal answers a request with what an error means.
func WriteRefusal(c *gin.Context, log zerolog.Logger, err error) { newRefuser(log).refuse(c, err) }

// refuse answers a call with what an error means.
func (r *refuser) refuse(c *gin.Context, err error) {
	m, why := meaningOf(err), &Refusal{is: err, detail: err.Error()}
	// The outermost one, whose sentence is about this call.
	errors.As(err, &why)

	// Anything else is the client's mistake, and no news for an operator.
	if m.status >= http.StatusInternalServerError {
		r.note(c, &m, why.is)
	}

	if m.detail != "" {
		why = &Refusal{detail: m.detail}
	}

	// A conflict that nobody has put into words describes itself.
	var conflict *counter.Conflict
	isConflict := errors.As(err, &conflict) && m.status == http.StatusConflict
	if isConflict {
		detail := why.detail
		if why.is == err {
			detail = conflictDetail(c.Request, conflict)
		}
		httppolicy.Conflict(c.Writer, detail, presence.KeyOf(conflict.Key), conflict.Value)
		return
	}

	write := httppolicy.Problem
	if m.unread {
		// The body is not read, and net/http would wait for the rest of it.
		write = httppolicy.RefuseBody
	}
	write(c.Writer, m.status, why.detail, append([]httppolicy.Option{m.headers}, why.options...)...)
}

// headers sets the headers that all refusals of this meaning have.
func (m *meaning) headers(h http.Header) {
	if m.challenge != "" {
		h.Set("WWW-Authenticate", m.challenge)
	}
	if m.again > 0 {
		httppolicy.RetryAfter(m.again)(h)
	}
	if m.reason != "" {
		httppolicy.Because(m.reason)(h)
	}
}

// note logs why a call could not be carried out. The answer has the id of the line.
func (r *refuser) note(c *gin.Context, m *meaning, cause error) {
	id := httppolicy.RequestID(c.Writer.Header())
	write := func(line *zerolog.Event, text string) {
		line.Err(cause).Str("route", c.FullPath()).Str("request_id", id).Msg(text)
	}

	switch {
	case m.malformed:
		r.malformed.Do(func() {
			write(r.log.Error(), "the store has malformed data; delete it. This is logged at most once a minute "+
				"for each call")
		})
	case m.status == defect.status:
		write(r.log.Error(), "a call has a defect")
	default:
		write(r.log.Debug(), "a call could not be carried out")
	}
}

// conflictDetail returns the sentence about a change that a counter refuses, or about a read that has no answer.
func conflictDetail(r *http.Request, conflict *counter.Conflict) string {
	reads := Reads(r)

	begin, mend := "Nothing was changed: ", "use the calls of its kind, or another key"
	if reads {
		begin = "There is no answer: "
	}
	switch {
	case errors.Is(conflict.Is, counter.ErrBound):
		mend = "send a change that stays within its bounds"
	case errors.Is(conflict.Is, counter.ErrReservation):
		mend = "look at GET …/reservations, or use another id"
	case errors.Is(conflict.Is, counter.ErrOverflow):
		mend = "a value has 64 bits; send a smaller change, or reset the counter before"
		if reads {
			mend = "ask for the aggregate of fewer counters, by a longer prefix"
		}
	}

	return begin + conflict.Is.Error() + ": " + conflict.Text + "; " + mend + "."
}

// Reads reports whether a request changes nothing.
func Reads(r *http.Request) bool { return r.Method == http.MethodGet || r.Method == http.MethodHead }
