package pusher

import (
	"crypto/hmac"
	"crypto/md5"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
)

// Bounds of what a back end sends, as Pusher has them.
const (
	MaxSignatureAge = 10 * time.Minute // either way, since the clocks of two servers differ
	maxChannels     = 100              // of one event
	maxBatch        = 10               // events of one batch
)

// Changed is the one event that a back end may trigger: the pages of its channels were modified.
const Changed = "headcount:changed"

// ErrSignature refuses a request that its back end has not signed as it must.
var ErrSignature = errors.New("the call is not signed by the back end of the app")

// ErrMessage refuses an event that would be a message to clients.
var ErrMessage = errors.New("headcount carries no messages: the only event is " + Changed +
	", by which the page of a channel was modified; send all others to the service that carries your messages")

// App is what clients and back ends of an app are known by.
type App struct {
	Key     string   // see CheckKey
	Secrets []string // any of them may have signed; empty: back ends are not served
}

// Params are the parameters of a signed request.
type Params map[string]string

// Open returns the parameters of a request if the app has signed it lately. path is escaped, as it was sent. Bodies are
// signed by their hash alone, see CheckBody, so that nobody else can have the server read one.
func (a App) Open(method, path, query string, now time.Time) (Params, error) {
	params, err := parseQuery(query)
	if err != nil {
		return nil, err
	}

	// The signature is of all other parameters.
	given := params["auth_signature"]
	delete(params, "auth_signature")
	if given == "" {
		return nil, unsigned("sign it as Pusher's libraries do, with auth_key, auth_timestamp, auth_version, " +
			"auth_signature and, of a body, body_md5")
	}
	if params["auth_key"] != a.Key {
		return nil, unsigned("auth_key is not that of --pusher-key")
	}
	if !a.signed(method+"\n"+path+"\n"+params.text(), given) {
		return nil, unsigned("auth_signature does not fit; sign with one of --pusher-secret, and have proxies pass " +
			"the path and the query on as they are")
	}

	return params, params.checkTime(now)
}

// signed reports whether one of the secrets signs a text like this.
func (a App) signed(text, signature string) bool {
	// Any of them, so that a secret can be replaced without a gap.
	return slices.ContainsFunc(a.Secrets, func(secret string) bool {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(text))
		want := hex.EncodeToString(mac.Sum(nil))

		return subtle.ConstantTimeCompare([]byte(want), []byte(signature)) == 1
	})
}

// parseQuery reads a query. url.ParseQuery would refuse a semicolon, which Pusher permits in names of channels.
func parseQuery(query string) (Params, error) {
	params := Params{}
	for pair := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(pair, "=")

		name, badName := url.QueryUnescape(name)
		value, badValue := url.QueryUnescape(value)
		if err := errors.Join(badName, badValue); err != nil {
			return nil, unsigned("its query cannot be read")
		}

		params[name] = value
	}

	return params, nil
}

// text returns the parameters in the form in which they are signed: sorted by name, and not escaped.
func (p Params) text() string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(p)) {
		pairs = append(pairs, name+"="+p[name])
	}

	return strings.Join(pairs, "&")
}

// checkTime returns an error for a signature that is not of about now.
func (p Params) checkTime(now time.Time) error {
	seconds, err := strconv.ParseInt(p["auth_timestamp"], 10, 64)
	if err != nil {
		return unsigned("auth_timestamp is no time in whole seconds")
	}

	// The time of a signature has lost its fraction, so that of the clock is left out, too.
	age := now.Truncate(time.Second).Sub(time.Unix(seconds, 0)).Abs()
	if age > MaxSignatureAge {
		return unsigned("auth_timestamp is more than ten minutes from the clock of this server; sign each call anew, " +
			"and set the clocks of both")
	}

	return nil
}

// CheckBody returns an error unless the body is the one that was signed.
func (p Params) CheckBody(body []byte) error {
	sum := md5.Sum(body)
	// No comparison in constant time is needed: whoever sent the body knows its hash.
	if p["body_md5"] == hex.EncodeToString(sum[:]) {
		return nil
	}

	return unsigned("body_md5 is not the hash of the body")
}

// unsigned returns an ErrSignature with what to do.
func unsigned(mend string) error { return fmt.Errorf("%w: %s", ErrSignature, mend) }

// Info is what a back end asks about channels.
type Info struct{ subscriptions, users bool }

// ParseInfo reads a list of attributes.
func ParseInfo(list string) (info Info, err error) {
	if list == "" {
		return info, nil
	}

	for name := range strings.SplitSeq(list, ",") {
		switch name {
		case "subscription_count":
			info.subscriptions = true
		case "user_count":
			info.users = true
		default:
			return info, fmt.Errorf("the parameter info has %q; this server knows subscription_count and user_count, "+
				"which are the same here: how many people are on the page", presence.Excerpt(name))
		}
	}

	return info, nil
}

// AppendChannels appends the occupied channels with what was asked about each.
func (i Info) AppendChannels(b []byte, channels []presence.PageUsers, stale bool) []byte {
	b = append(b, `{"channels":{`...)
	for n, channel := range channels {
		if n > 0 {
			b = append(b, ',')
		}
		b = presence.AppendString(b, channel.Page)
		b = append(b, ":{"...)
		// These are the first members of their object.
		b = append(b, strings.TrimPrefix(i.attributes(channel.Users), ",")...)
		b = append(b, '}')
	}
	b = append(b, '}')

	return append(appendStale(b, stale), '}')
}

// AppendChannel appends whether a channel is occupied, with what was asked about it.
func (i Info) AppendChannel(b []byte, users int64, stale bool) []byte {
	b = append(b, `{"occupied":`...)
	b = strconv.AppendBool(b, users > 0)
	b = append(b, i.attributes(users)...)

	return append(appendStale(b, stale), '}')
}

// attributes returns what was asked as members of JSON, each after a comma.
func (i Info) attributes(users int64) (members string) {
	count := strconv.FormatInt(users, 10)
	if i.subscriptions {
		members += `,"subscription_count":` + count
	}
	if i.users {
		members += `,"user_count":` + count
	}

	return members
}

func appendStale(b []byte, stale bool) []byte {
	if stale {
		b = append(b, `,"stale":true`...)
	}

	return b
}

// trigger is an event of a back end, for one channel or several.
type trigger struct {
	Name     string
	Channel  string
	Channels []string
	Info     string
}

// ParseTrigger reads the body of an event, and returns the pages that it says were modified.
func ParseTrigger(body []byte) (pages []string, err error) {
	const form = `{"name":"` + Changed + `","channels":["news"],"data":"{}"}`
	var t trigger
	if err := parseBody(body, &t, form); err != nil {
		return nil, err
	}

	return t.pages()
}

// ParseBatch reads the body of a batch of events, and returns the pages that they say were modified, in their order.
func ParseBatch(body []byte) (pages []string, err error) {
	const form = `{"batch":[{"name":"` + Changed + `","channel":"news","data":"{}"}]}`
	var all struct{ Batch []trigger }
	if err := parseBody(body, &all, form); err != nil {
		return nil, err
	}
	if len(all.Batch) == 0 || len(all.Batch) > maxBatch {
		return nil, fmt.Errorf("a batch has 1 to %d events, such as %s", maxBatch, form)
	}

	for _, t := range all.Batch {
		// An event that cannot be read refuses the batch before any page counts as modified.
		some, err := t.pages()
		if err != nil {
			return nil, err
		}
		pages = append(pages, some...)
	}

	return pages, nil
}

func parseBody(body []byte, into any, form string) error {
	// Otherwise json would read different channels as the same one.
	if err := presence.CheckUnicode(body); err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("the body is a JSON object such as %s", form)
	}

	return nil
}

// pages returns the pages of an event. It is one modification of each.
func (t *trigger) pages() ([]string, error) {
	if t.Name != Changed {
		return nil, ErrMessage
	}
	// A library would wait for an answer with channels, and fail without them.
	if t.Info != "" {
		return nil, errors.New("an event is answered without info; ask for it with GET /apps/{app_id}/channels")
	}

	pages := t.Channels
	if t.Channel != "" {
		pages = append(pages, t.Channel)
	}
	if len(pages) == 0 || len(pages) > maxChannels {
		return nil, fmt.Errorf("an event has 1 to %d channels", maxChannels)
	}

	// An event that names a page twice is still one modification.
	slices.Sort(pages)
	pages = slices.Compact(pages)
	for _, page := range pages {
		if err := presence.CheckPage(page); err != nil {
			return nil, fmt.Errorf("the channel %q is no page: %w", presence.Excerpt(page), err)
		}
	}

	return pages, nil
}
