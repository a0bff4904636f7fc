package rpc

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/seal"
)

// replayWidth is how many later requests of one client may overtake a request: far more
// than a client has in flight.
const replayWidth = 1 << 14

// Updates takes updates for the gateway of this process.
type Updates interface {
	ReceiveUpdates(from string, updates []presence.Update)
}

// Holds takes or ends holds for the node of this process.
type Holds interface {
	ReceiveHold(ctx context.Context, change presence.HoldChange) error
}

// Users knows users whose partitions this process owns.
type Users interface {
	ReceiveUsers(ctx context.Context, users []presence.User) ([]presence.UserState, error)
}

// Parts knows some of what counts are made of.
type Parts interface {
	ReceiveExplain(ctx context.Context, page string) (presence.Parts, error)
}

// Reports returns the report of this process.
type Reports interface{ Report() presence.Report }

// Config tunes a Handler. A zero field takes its default.
type Config struct {
	// Keys are the cluster's secrets: the first signs, all verify. Without keys the Handler
	// accepts only unsigned requests.
	Keys [][]byte
	Name string           // requests for other names are refused; default: no name is refused
	Now  func() time.Time // the time of the cluster, the zero time while it is not known; default time.Now

	// Several goroutines at a time call these. Requests for one that is nil get status 404.
	Updates Updates
	Holds   Holds
	Users   Users
	Parts   Parts
	Reports Reports
	Links   Links

	Registerer prometheus.Registerer // registers the handler's metrics; nil: there are none
	Log        zerolog.Logger
}

// Handler serves the requests of other processes.
type Handler struct {
	cfg      Config
	keys     *seal.Keys
	guard    *seal.Guard
	requests *prometheus.CounterVec
	refused  *prometheus.CounterVec
	formats  sync.Once // logs a request of another format once
}

// NewHandler returns a Handler.
func NewHandler(cfg Config) (*Handler, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	keys, err := seal.NewKeys(cfg.Keys, purpose)
	if err != nil {
		return nil, fmt.Errorf("rpc: %w", err)
	}

	h := &Handler{
		cfg:   cfg,
		keys:  keys,
		guard: seal.NewGuard(replayWidth, cfg.Now()),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_cluster_requests_total",
			Help: "Requests of other processes, by kind and code of the answer.",
		}, []string{"path", "code"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_cluster_requests_refused_total", Help: "Requests that were refused, by reason.",
		}, []string{"reason"}),
	}

	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(h.requests, h.refused)
	}

	return h, nil
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path

	switch {
	// First, since nothing else of such a request can be understood.
	case otherFormat(r.Header.Get("Authorization")):
		h.refuseFormat(w, r)
		return
	case !h.serves(path):
		writeProblem(w, http.StatusNotFound, "not_found", "there is no such path here")
		return
	case r.Method != http.MethodPut:
		w.Header().Set("Allow", http.MethodPut)
		writeProblem(w, http.StatusMethodNotAllowed, "method", "only PUT is allowed")
		return
	}

	req, err := h.open(w, r)
	// A link lasts, so it has neither a limit nor an answer.
	if err == nil && path == linkPath {
		h.requests.WithLabelValues(path, "ok").Inc()
		h.serveLink(w, r)
		return
	}

	var answer []byte
	switch {
	case err != nil:
	case path == reportPath:
		answer, err = json.Marshal(h.cfg.Reports.Report())
	default:
		// After that time the caller may have asked for the opposite elsewhere.
		ctx, cancel := req.limit(r.Context())
		defer cancel()
		answer, err = h.carryOut(ctx, path, req)
	}

	if err == nil && answer != nil {
		h.requests.WithLabelValues(path, "ok").Inc()
		writeAnswer(w, answer)
		return
	}

	status, code := h.statusOf(err)
	h.requests.WithLabelValues(path, code).Inc()

	// Anybody may cause these, and as many as they like: the log has them at this level alone.
	if refusal := (*seal.Refusal)(nil); errors.As(err, &refusal) {
		h.refused.WithLabelValues(code).Inc()
		h.cfg.Log.Debug().Err(err).Str("remote", r.RemoteAddr).Msg("a request of another process was refused")
	}

	switch {
	case err == nil:
		w.WriteHeader(status)
	// What was not expected is for the log, and not for the caller.
	case status == http.StatusInternalServerError:
		h.cfg.Log.Error().Err(err).Str("path", path).Msg("a request of another process could not be answered")
		writeProblem(w, status, code, "")
	default:
		writeProblem(w, status, code, err.Error())
	}
}

// serves reports whether this process handles requests for a path.
func (h *Handler) serves(path string) bool {
	switch path {
	case updatesPath:
		return h.cfg.Updates != nil
	case holdPath:
		return h.cfg.Holds != nil
	case usersPath:
		return h.cfg.Users != nil
	case explainPath:
		return h.cfg.Parts != nil
	case reportPath:
		return h.cfg.Reports != nil
	case linkPath:
		return h.cfg.Links != nil
	}

	return false
}

// refuseFormat refuses a request of another format. It logs only the first such request:
// they continue until one of the two processes is replaced.
func (h *Handler) refuseFormat(w http.ResponseWriter, r *http.Request) {
	h.refused.WithLabelValues(ErrFormat.Reason).Inc()
	h.formats.Do(func() {
		h.cfg.Log.Error().Str("remote", r.RemoteAddr).Int("format", format).
			Msg("a process of another version sends requests in an unknown format; run the same version everywhere")
	})

	status, code := h.statusOf(ErrFormat)
	writeProblem(w, status, code, ErrFormat.Error())
}

// request is a request whose signature and body are right.
type request struct {
	from string
	body []byte
	left time.Duration // how much longer the caller waits; 0: the request does not say it
}

// limit returns a context that ends when the caller gives up.
func (r *request) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	// The release before does not send it.
	if r.left == 0 {
		return context.WithCancel(ctx)
	}

	return context.WithTimeout(ctx, r.left)
}

// open checks the signature before it reads the body, and then checks the body.
func (h *Handler) open(w http.ResponseWriter, r *http.Request) (*request, error) {
	c, header, mac, ok := parseCredentials(r.Header.Get("Authorization"))
	if !ok {
		return nil, ErrUnsigned
	}

	digest := r.Header.Get("Content-Digest")
	// One goroutine at a time may use a Signer, so each request makes one.
	if err := h.keys.Signer().Verify(c.key, signed(r.Method, r.Host, r.RequestURI, digest, header), mac); err != nil {
		return nil, err
	}

	// As with datagrams: a recorded request must be of no use at another process.
	if h.cfg.Name != "" && r.Host != h.cfg.Name {
		return nil, ErrMisdirected
	}
	if r.ContentLength > maxBody {
		return nil, ErrOversized
	}

	// After the signature: a forged request must not use up the number of a true one.
	from, err := h.guard.Admit(h.cfg.Now(), []byte(c.from), c.incarnation, c.at, c.number)
	if err != nil {
		return nil, err
	}

	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
		return nil, ErrOversized
	} else if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrTruncated, err)
	}
	// The signature covers the digest, and by it the body.
	if digest != digestOf(body) {
		return nil, ErrDigest
	}

	// The link may have stalled before the headers or within the body.
	left, known := remaining(r.URL.Query(), h.cfg.Now())
	if known && left <= 0 {
		return nil, ErrLate
	}

	return &request{from, body, left}, nil
}

// carryOut carries out a request, and returns the body of the answer; nil: it has none.
func (h *Handler) carryOut(ctx context.Context, path string, req *request) ([]byte, error) {
	switch path {
	case usersPath:
		return h.users(ctx, req.body)
	case explainPath:
		return h.explain(ctx, req.body)
	case updatesPath:
		updates, err := parseUpdates(req.body)
		if err != nil {
			return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
		}
		h.cfg.Updates.ReceiveUpdates(req.from, updates)

		return nil, nil
	}

	change, err := parseHold(req.body, h.cfg.Now())
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}

	return nil, h.cfg.Holds.ReceiveHold(ctx, change)
}

// statusOf returns the status and the code of the answer to an error.
func (h *Handler) statusOf(err error) (status int, code string) {
	refusal := (*seal.Refusal)(nil)

	switch {
	case err == nil:
		return http.StatusNoContent, "ok"
	case errors.As(err, &refusal):
		switch refusal {
		case ErrFormat, ErrMalformed, ErrDigest, ErrTruncated:
			return http.StatusBadRequest, refusal.Reason
		case ErrOversized:
			return http.StatusRequestEntityTooLarge, refusal.Reason
		case ErrMisdirected:
			return http.StatusMisdirectedRequest, refusal.Reason
		case ErrLate:
			return http.StatusRequestTimeout, refusal.Reason
		}
		// The others concern the signature, the time or the number of the request.
		return http.StatusUnauthorized, refusal.Reason
	case errors.Is(err, presence.ErrNotOwner):
		return http.StatusConflict, codeNotOwner
	case errors.Is(err, presence.ErrOvertaken):
		return http.StatusConflict, codeOvertaken
	case errors.Is(err, presence.ErrTooMany):
		return http.StatusTooManyRequests, codeTooMany
	case errors.Is(err, presence.ErrUnavailable),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return http.StatusServiceUnavailable, codeUnavailable
	}

	return http.StatusInternalServerError, codeInternal
}

func digestOf(body []byte) string {
	sum := sha256.Sum256(body)
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

// problem is an error in the form of RFC 9457.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Code   string `json:"code"`
	Detail string `json:"detail,omitempty"`
}

func writeProblem(w http.ResponseWriter, status int, code, detail string) {
	body, err := json.Marshal(problem{"about:blank", http.StatusText(status), status, code, detail})
	if err != nil {
		panic(err) // cannot happen: all fields are plain
	}

	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	// RFC 9110 demands it of every 401.
	if status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", scheme)
	}

	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}
