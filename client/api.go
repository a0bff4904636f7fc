package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	countersPath = "/api/v1/counters"
	limitsPath   = "/api/v1/limits"

	maxProblem = 4 << 10 // of an error answer
	maxAnswer  = 4 << 20
)

// An Error is an answer by which the server refuses a call, a problem in terms of RFC 9457.
type Error struct {
	Status     int           `json:"status"`
	Title      string        `json:"title"`
	Detail     string        `json:"detail"`
	RetryAfter time.Duration `json:"-"`     // 0: not in the answer
	Key        string        `json:"key"`   // with status 409: the counter at fault …
	Value      int64         `json:"value"` // … and its value
}

func (e *Error) Error() string {
	text := fmt.Sprintf("status %d", e.Status)
	// A proxy's answer has no title, and some problems no detail.
	for _, more := range []string{e.Title, e.Detail} {
		if more != "" {
			text += ": " + more
		}
	}

	return text
}

// Temporary reports whether the same call may succeed later. A change that had an
// Idempotency-Key may be repeated with the same one, and is made once.
func (e *Error) Temporary() bool {
	switch e.Status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	default:
		return false
	}
}

func errorOf(resp *http.Response) *Error {
	e := &Error{}
	// The status alone is an answer, so a body that breaks off is used as far as it came.
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if json.Unmarshal(body, e) != nil {
		// The body may be the answer of a proxy in front of the server.
		*e = Error{Detail: string(bytes.TrimSpace(body[:min(len(body), 200)]))}
	}

	// The status line wins over the member of the body, which a proxy may have rewritten.
	e.Status = resp.StatusCode
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e.RetryAfter = time.Duration(seconds) * time.Second
	}

	return e
}

// An API makes HTTP calls. It never repeats a call by itself. If the server refuses a call, the
// error is an *Error; if the answer is not in the contract, the error wraps ErrFrame.
type API struct {
	cfg  Config
	once string
}

// NewAPI returns an API.
func NewAPI(cfg Config) *API { return &API{cfg: cfg} }

// Once returns an API whose changes carry an Idempotency-Key: the same change with the
// same key is made once, however often it is sent within a day.
func (a *API) Once(key string) *API { return &API{cfg: a.cfg, once: key} }

// Do makes any call. in is sent as JSON, unless it is nil, and the answer is read into out,
// unless that is nil. Do returns the header of the answer.
func (a *API) Do(ctx context.Context, method, path string, in, out any) (http.Header, error) {
	resp, err := a.send(ctx, method, path, in)
	if err != nil {
		return nil, err
	}

	// errorOf reads a bounded part of a body; Close gives up the rest.
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return resp.Header, errorOf(resp)
	}

	// The answer is read even if nobody wants it, so that net/http can use the connection again. One above the bound is
	// cut, and so is refused as JSON below.
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}

	if out == nil {
		return resp.Header, nil
	}

	if err := json.Unmarshal(body, out); err != nil {
		return nil, fmt.Errorf("%w: %s %s: %w: %.200s", ErrFrame, method, path, err, body)
	}

	return resp.Header, nil
}

func (a *API) send(ctx context.Context, method, path string, in any) (*http.Response, error) {
	// Declared as the interface, because a nil *bytes.Reader in it would not equal nil.
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", method, path, err)
		}
		body = bytes.NewReader(text)
	}

	req, err := http.NewRequestWithContext(ctx, method, a.cfg.address(path), body)
	if err != nil {
		return nil, err
	}

	req.GetBody = nil // or net/http would repeat a request whose connection was lost
	a.cfg.sign(req.Header)
	if a.cfg.ID != "" {
		req.Header.Set("Headcount-Id", a.cfg.ID)
	}

	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}

	if a.once != "" {
		req.Header.Set("Idempotency-Key", a.once)
	}

	// The copy keeps the check of redirects from the program's other uses of its http.Client.
	httpClient := *cmp.Or(a.cfg.HTTP, http.DefaultClient)
	if httpClient.CheckRedirect == nil {
		httpClient.CheckRedirect = checkRedirect
	}

	return httpClient.Do(req)
}

func pagePath(page, rest string) string {
	// The * of the whole site is sent as it is; no page has that name.
	if page != "*" {
		page = url.PathEscape(page)
	}

	return "/" + page + rest
}

// Count returns how many users are on a page; "*" is the whole site.
func (a *API) Count(ctx context.Context, page string) (Count, error) {
	return a.count(ctx, http.MethodGet, page, "", nil)
}

// Regions is Count with the count of each region.
func (a *API) Regions(ctx context.Context, page string) (Count, error) {
	return a.count(ctx, http.MethodGet, page, "?regions=1", nil)
}

func (a *API) count(ctx context.Context, method, page, query string, in any) (c Count, err error) {
	_, err = a.Do(ctx, method, pagePath(page, "/counter"+query), in, &c)
	// A proxy that maps paths wrongly would otherwise show one page's users as another's.
	if err == nil && c.Page != page {
		err = fmt.Errorf("%w: the answer is not the count of %q but of %q", ErrFrame, page, c.Page)
	}

	return c, err
}

// Counts returns the counts of up to 100 pages.
func (a *API) Counts(ctx context.Context, pages ...string) ([]Count, error) {
	var list struct {
		Counters []Count `json:"counters"`
	}

	_, err := a.Do(ctx, http.MethodGet, "/-/counters?"+url.Values{"page": pages}.Encode(), nil, &list)

	return list.Counters, err
}

// A Day is what a page remembers of one day, in UTC.
type Day struct {
	At            time.Time `json:"at"` // when it began
	Max           int64     `json:"max"`
	Avg           float64   `json:"avg"` // the mean count, of the running day up to now
	Joins         int64     `json:"joins"`
	Visitors      int64     `json:"visitors"` // different users, estimated
	PersonMinutes int64     `json:"person_minutes"`
}

// Days returns so many whole days of a page and the running one, oldest first. It fails where the server keeps fewer.
func (a *API) Days(ctx context.Context, page string, days int) ([]Day, error) {
	var list struct {
		Points []Day `json:"points"`
	}

	path := fmt.Sprintf("/stats?last=%dd&step=1d", days)
	_, err := a.Do(ctx, http.MethodGet, pagePath(page, path), nil, &list)
	// The points have no gaps, so a caller may take the index for the day.
	if err == nil && len(list.Points) != days+1 {
		err = fmt.Errorf("%w: %d days, want %d", ErrFrame, len(list.Points), days+1)
	}

	return list.Points, err
}

// Hold makes the user present on a page without a connection, for three times the server's
// presence-timeout; a repeated call renews the hold. id is the new id of an anonymous user, if
// the server has issued one, for Config.ID of later calls.
func (a *API) Hold(ctx context.Context, page string) (c Count, id string, err error) {
	in := map[string]string{"action": "increment"}
	header, err := a.Do(ctx, http.MethodPut, pagePath(page, "/counter"), in, &c)

	// A cookie alone has an id that was signed anew; --cookie-name may give it another name.
	id = header.Get("Headcount-Id")
	for _, cookie := range (&http.Response{Header: header}).Cookies() {
		if strings.HasPrefix(cookie.Name, "headcount_id") { // of the first site, or of another one with its name
			id = cookie.Value
		}
	}

	return c, id, err
}

// Release ends a hold.
func (a *API) Release(ctx context.Context, page string) (Count, error) {
	return a.count(ctx, http.MethodPut, page, "", map[string]string{"action": "decrement"})
}

func keyPath(key, rest string) string { return countersPath + "/" + url.PathEscape(key) + rest }

func (a *API) counter(ctx context.Context, method, key, rest string, in any) (c Counter, err error) {
	header, err := a.Do(ctx, method, keyPath(key, rest), in, &c)
	// As in count: the value of another key must not pass for this one's.
	if err == nil && c.Key != key {
		err = fmt.Errorf("%w: the answer is not the counter %q but %q", ErrFrame, key, c.Key)
	}

	c.Replayed = header.Get("Idempotent-Replay") == "true"

	return c, err
}

// Counter returns a counter, which may lag a little.
func (a *API) Counter(ctx context.Context, key string) (Counter, error) {
	return a.counter(ctx, http.MethodGet, key, "", nil)
}

// Exact returns a counter with all changes that were acknowledged before the call.
func (a *API) Exact(ctx context.Context, key string) (Counter, error) {
	return a.counter(ctx, http.MethodGet, key, "/exact", nil)
}

// Counters returns up to 100 counters in the order of their keys, each once.
func (a *API) Counters(ctx context.Context, keys ...string) ([]Counter, error) {
	// The server answers a repeated key once.
	distinct := slices.Compact(slices.Sorted(slices.Values(keys)))
	return a.counters(ctx, http.MethodGet, "?"+url.Values{"key": keys}.Encode(), nil, len(distinct))
}

func (a *API) counters(ctx context.Context, method, query string, in any, want int) ([]Counter, error) {
	var list struct {
		Counters []Counter `json:"counters"`
	}

	header, err := a.Do(ctx, method, countersPath+query, in, &list)
	// Callers match the answers of a batch by index, which a missing one would shift.
	if err == nil && len(list.Counters) != want {
		err = fmt.Errorf("%w: %d counters, want %d", ErrFrame, len(list.Counters), want)
	}

	// The header is one for the whole batch, because a batch is repeated as a whole.
	for i := range list.Counters {
		list.Counters[i].Replayed = header.Get("Idempotent-Replay") == "true"
	}

	return list.Counters, err
}

// Increment raises a counter by delta, which is greater than 0.
func (a *API) Increment(ctx context.Context, key string, delta int64) (Counter, error) {
	return a.counter(ctx, http.MethodPost, key, "/increment", map[string]int64{"delta": delta})
}

// Decrement lowers a counter by delta, which is greater than 0.
func (a *API) Decrement(ctx context.Context, key string, delta int64) (Counter, error) {
	return a.counter(ctx, http.MethodPost, key, "/decrement", map[string]int64{"delta": delta})
}

// A Change is one change of a batch.
type Change struct {
	Key        string            `json:"key"`
	Delta      int64             `json:"delta"`
	Dimensions map[string]string `json:"dimensions,omitempty"`
}

// Change makes up to 1,000 changes in one call, and returns the counter of each.
func (a *API) Change(ctx context.Context, changes ...Change) ([]Counter, error) {
	return a.counters(ctx, http.MethodPost, "", map[string]any{"changes": changes}, len(changes))
}

type reasoned struct {
	Delta  int64  `json:"delta,omitempty"`
	Value  *int64 `json:"value,omitempty"`
	Reason string `json:"reason"`
	By     string `json:"by"`
}

// Adjust corrects a counter by delta, and records reason and by in its ledger.
func (a *API) Adjust(ctx context.Context, key string, delta int64, reason, by string) (Counter, error) {
	return a.counter(ctx, http.MethodPost, key, "/adjust", reasoned{Delta: delta, Reason: reason, By: by})
}

// Set sets the value of an exact counter, and records reason and by in its ledger.
func (a *API) Set(ctx context.Context, key string, value int64, reason, by string) (Counter, error) {
	return a.counter(ctx, http.MethodPost, key, "/set", reasoned{Value: &value, Reason: reason, By: by})
}

// Reset sets a counter to 0, and records reason and by in its ledger.
func (a *API) Reset(ctx context.Context, key, reason, by string) (Counter, error) {
	return a.counter(ctx, http.MethodPost, key, "/reset", reasoned{Reason: reason, By: by})
}

// Delete deletes a counter.
func (a *API) Delete(ctx context.Context, key string) error {
	_, err := a.Do(ctx, http.MethodDelete, keyPath(key, ""), nil, nil)
	return err
}

// Me is the member that stands for the caller.
const Me = "me"

func (a *API) member(ctx context.Context, method, key, member string) (Counter, error) {
	c, err := a.counter(ctx, method, key, "/members/"+url.PathEscape(member), nil)
	// Without the member nil would read as "not a member".
	if err == nil && c.Member == nil {
		err = fmt.Errorf("%w: the answer does not say whether %q is a member of %q", ErrFrame, member, key)
	}

	return c, err
}

// AddMember adds a member to a set. In the result, Member is true.
func (a *API) AddMember(ctx context.Context, key, member string) (Counter, error) {
	return a.member(ctx, http.MethodPut, key, member)
}

// RemoveMember removes a member from a set. In the result, Member is false.
func (a *API) RemoveMember(ctx context.Context, key, member string) (Counter, error) {
	return a.member(ctx, http.MethodDelete, key, member)
}

// Member returns a set; in the result, Member says whether member is in the set.
func (a *API) Member(ctx context.Context, key, member string) (Counter, error) {
	return a.member(ctx, http.MethodGet, key, member)
}

// EditMembers adds and removes up to 1,000 members in one call.
func (a *API) EditMembers(ctx context.Context, key string, add, remove []string) (Counter, error) {
	in := struct {
		Add    []string `json:"add,omitempty"`
		Remove []string `json:"remove,omitempty"`
	}{add, remove}

	return a.counter(ctx, http.MethodPost, key, "/members", in)
}

// An Entry is an entry of a counter's ledger.
type Entry struct {
	Seq    uint64    `json:"seq"`
	At     time.Time `json:"at"`
	Op     string    `json:"op"`
	Delta  int64     `json:"delta"`
	Before int64     `json:"before"`
	After  int64     `json:"after"`
	Reason string    `json:"reason"`
	By     string    `json:"by"`
}

// Ledger returns up to limit entries after the entry numbered after, oldest first. next is 0 on
// the last page; otherwise it is the value of after for the next page.
func (a *API) Ledger(
	ctx context.Context, key string, after uint64, limit int,
) (entries []Entry, next uint64, err error) {
	var page struct {
		Entries []Entry `json:"entries"`
		Next    uint64  `json:"next"`
	}

	path := keyPath(key, fmt.Sprintf("/ledger?after=%d&limit=%d", after, limit))
	_, err = a.Do(ctx, http.MethodGet, path, nil, &page)

	return page.Entries, page.Next, err
}

// A Reservation is an amount that was taken out of an exact counter. It comes back when the reservation expires or is
// cancelled, and stays taken when it is committed.
type Reservation struct {
	ID        string    `json:"id"`
	Amount    int64     `json:"amount"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Reserve takes amount out of an exact counter for a time from 1s to 31d. The same id and amount again, while the
// reservation is open, takes nothing more; in that result, Replayed is true.
func (a *API) Reserve(
	ctx context.Context, key, id string, amount int64, d time.Duration,
) (Counter, Reservation, error) {
	in := struct {
		ID     string `json:"id"`
		Amount int64  `json:"amount"`
		For    string `json:"for"`
	}{id, amount, d.String()}

	return a.reservation(ctx, key, "", in)
}

// Commit ends a reservation; its amount stays taken. It may be repeated for a day.
func (a *API) Commit(ctx context.Context, key, id string) (Counter, Reservation, error) {
	return a.reservation(ctx, key, "/"+url.PathEscape(id)+"/commit", nil)
}

// Cancel ends a reservation and gives its amount back. It may be repeated for a day.
func (a *API) Cancel(ctx context.Context, key, id string) (Counter, Reservation, error) {
	return a.reservation(ctx, key, "/"+url.PathEscape(id)+"/cancel", nil)
}

func (a *API) reservation(ctx context.Context, key, rest string, in any) (Counter, Reservation, error) {
	var out struct {
		Counter     Counter     `json:"counter"`
		Reservation Reservation `json:"reservation"`
	}
	header, err := a.Do(ctx, http.MethodPost, keyPath(key, "/reservations"+rest), in, &out)
	out.Counter.Replayed = header.Get("Idempotent-Replay") == "true"

	return out.Counter, out.Reservation, err
}

// Reservations returns up to 1,000 open reservations of a counter, in the order of their ids, which are greater than
// after. next is empty on the last page; otherwise it is the value of after for the next page.
func (a *API) Reservations(ctx context.Context, key, after string) (open []Reservation, next string, err error) {
	var page struct {
		Open []Reservation `json:"reservations"`
		Next string        `json:"next"`
	}

	path := keyPath(key, "/reservations")
	if after != "" {
		path += "?" + url.Values{"after": {after}}.Encode()
	}
	_, err = a.Do(ctx, http.MethodGet, path, nil, &page)

	return page.Open, page.Next, err
}

// An Aggregate is the sum of all counters of a match.
type Aggregate struct {
	Match    string `json:"match"`
	Counters int    `json:"counters"`
	Value    int64  `json:"value"`
}

// Aggregate adds up the counters that match a prefix followed by "*".
func (a *API) Aggregate(ctx context.Context, match string) (sum Aggregate, err error) {
	_, err = a.Do(ctx, http.MethodGet, keyPath(match, "/aggregate"), nil, &sum)
	return sum, err
}

// A Limit bounds the calls in a window of time.
type Limit struct {
	Limit     int64
	Window    time.Duration
	Cost      int64  // of the call; 0 means 1, and a negative one gives back
	Algorithm string // fixed, sliding or log; empty means sliding
}

// A Verdict is the answer to a call on a limit.
type Verdict struct {
	Allowed    bool
	Limit      int64
	Remaining  int64
	ResetAfter time.Duration
}

// LookAtLimit returns what is left of a limit, without counting a call. The Cost of l is ignored.
func (a *API) LookAtLimit(ctx context.Context, key string, l Limit) (Verdict, error) {
	return a.limit(ctx, key, l, 0)
}

// ForgetLimit deletes what a limit has counted, for all windows and algorithms. It may be repeated.
func (a *API) ForgetLimit(ctx context.Context, key string) error {
	_, err := a.Do(ctx, http.MethodDelete, limitsPath+"/"+url.PathEscape(key), nil, nil)

	return err
}

// Limit asks whether a call may pass, and counts it if so. A refusal is a Verdict, not an error.
func (a *API) Limit(ctx context.Context, key string, l Limit) (Verdict, error) {
	return a.limit(ctx, key, l, cmp.Or(l.Cost, 1))
}

func (a *API) limit(ctx context.Context, key string, l Limit, cost int64) (Verdict, error) {
	in := struct {
		Limit     int64  `json:"limit"`
		Window    string `json:"window"`
		Cost      int64  `json:"cost"`
		Algorithm string `json:"algorithm,omitempty"`
	}{l.Limit, l.Window.String(), cost, l.Algorithm}
	path := limitsPath + "/" + url.PathEscape(key)

	resp, err := a.send(ctx, http.MethodPost, path, in)
	if err != nil {
		return Verdict{}, err
	}

	defer resp.Body.Close()

	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if err != nil {
		return Verdict{}, err
	}

	var out limitAnswer
	err = json.Unmarshal(body, &out)
	answered := err == nil && out.Allowed != nil // otherwise a 429 is one of the server's own rate

	passes := resp.StatusCode == http.StatusOK
	refused := resp.StatusCode == http.StatusTooManyRequests && answered
	if !passes && !refused {
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return Verdict{}, errorOf(resp)
	}

	whole := answered && out.Remaining != nil && out.ResetAfter != nil
	if !whole || *out.Allowed != passes {
		return Verdict{}, fmt.Errorf("%w: POST %s: status %d: %.200s", ErrFrame, path, resp.StatusCode, body)
	}

	return Verdict{*out.Allowed, out.Limit, *out.Remaining, time.Duration(*out.ResetAfter) * time.Millisecond}, nil
}

// limitAnswer is the JSON of a Verdict.
type limitAnswer struct {
	Allowed    *bool  `json:"allowed"`
	Limit      int64  `json:"limit"`
	Remaining  *int64 `json:"remaining"`
	ResetAfter *int64 `json:"reset_after_ms"`
}

// CounterEvents calls take with a counter now and whenever it changes, until ctx ends,
// the connection is lost or take returns an error. Config.HTTP must not limit the time.
func (a *API) CounterEvents(ctx context.Context, key string, take func(Counter) error) error {
	return stream(ctx, a, keyPath(key, "/events"), "counter", func(c Counter, id string) error {
		if c.Version.String() != id {
			return fmt.Errorf("%w: the event stream of %q: version %s under id %q", ErrFrame, key, c.Version, id)
		}
		return take(c)
	})
}

// A User says whether a user is here, in the region of the server.
type User struct {
	User     string    `json:"user"`
	Online   bool      `json:"online"`
	Since    time.Time `json:"since"`     // since when the user is present; zero if absent
	Pages    int       `json:"pages"`     // on how many
	Stale    bool      `json:"stale"`     // in UserEvents: the last known state; the owner does not answer
	LastSeen time.Time `json:"last_seen"` // of an absent user; zero: not known
}

const usersPath = "/-/users"

// Users returns which of up to 100 users are here, in the order asked, each once. It needs an API key.
func (a *API) Users(ctx context.Context, users ...string) ([]User, error) {
	var list struct {
		Users []User `json:"users"`
	}

	_, err := a.Do(ctx, http.MethodGet, usersPath+"?"+url.Values{"user": users}.Encode(), nil, &list)
	distinct := slices.Compact(slices.Sorted(slices.Values(users)))
	if err == nil && len(list.Users) != len(distinct) {
		err = fmt.Errorf("%w: %d users, want %d", ErrFrame, len(list.Users), len(distinct))
	}

	return list.Users, err
}

// UserEvents calls take with each of up to 100 users now, and when one comes or goes, at most once a second. It needs
// an API key, and ends as CounterEvents does.
func (a *API) UserEvents(ctx context.Context, take func(User) error, users ...string) error {
	path := usersPath + "/events?" + url.Values{"user": users}.Encode()
	return stream(ctx, a, path, "user", func(u User, _ string) error { return take(u) })
}

// PageUsers is a page and how many users are there.
type PageUsers struct {
	Page  string `json:"page"`
	Users int64  `json:"users"`
}

// TopPages are the pages that have the most users, most first.
type TopPages struct {
	Top   []PageUsers `json:"top"`
	Stale bool        `json:"stale"` // the list may be old, or lack pages
}

// TopEvents calls take with the up to n pages that have the most users now and when the list changes, at most once a
// second. n is 1 to 100. It ends as CounterEvents does.
func (a *API) TopEvents(ctx context.Context, n int, take func(TopPages) error) error {
	path := "/-/top/events?n=" + strconv.Itoa(n)
	return stream(ctx, a, path, "top", func(l TopPages, _ string) error { return take(l) })
}

// stream calls take with the data and the id of each event of a stream.
func stream[T any](ctx context.Context, a *API, path, name string, take func(of T, id string) error) error {
	resp, err := a.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}

	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errorOf(resp)
	}

	return events(resp.Body, func(event, id, data string) error {
		var of T
		err := json.Unmarshal([]byte(data), &of)
		if event != name || err != nil {
			return fmt.Errorf("%w: GET %s: event %q, data %.200q", ErrFrame, path, event, data)
		}

		return take(of, id)
	})
}

// ErrStreamEnded means that the server ended an event stream.
var ErrStreamEnded = errors.New("the event stream ended")

// events reads Server-Sent Events until the stream ends.
func events(stream io.Reader, take func(event, id, data string) error) error {
	lines := bufio.NewScanner(stream)
	lines.Buffer(nil, maxAnswer)
	var event, id, data string

	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch name {
		case "event":
			event = value
		case "id":
			id = value
		case "data":
			data = value
		}

		// Only the blank line completes an event: when the connection is lost, the last line may be half a one.
		isWhole := lines.Text() == "" && data != ""
		if !isWhole {
			continue
		}

		if err := take(event, id, data); err != nil {
			return err
		}
		data = ""
	}

	if err := lines.Err(); err != nil {
		return err
	}

	return ErrStreamEnded
}
