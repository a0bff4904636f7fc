// Package rpc carries the HTTP requests between the processes of a region:
// dispatchers push updates to gateways, gateways ask presence nodes to take holds,
// and gateways ask all processes for the reports that a dashboard shows.
//
//	PUT /updates  {"updates":[{"topic":"count//p","incarnation":1,"sequence":2,"stale":true,"value":"3 1700000000"}]}
//	PUT /hold     {"user":"00000000000000ff","page":"p","on":true,"asked":1700000000000}
//	PUT /report   {}
//
// The target has a query, ?until=unix ms, the time by which the caller gives up: a request that
// arrives later is refused, because the caller may have asked for the opposite since. Requests of
// releases before this one have none. Both times in a request, until and the time of sending, are
// those of the cluster, see seal.Clock.
//
// The answer is 204, for /report 200 and a report, or a problem (RFC 9457) with a member
// "code". Unknown members are ignored. Any change other than an addition needs a new number
// of the format: a process refuses requests of another format.
//
// A request is signed with the cluster's secret by two headers:
//
//	Content-Digest: sha-256=:base64 of the body's:            (RFC 9530)
//	Authorization: Headcount format=2, key=8 hex digits, from="name", time=unix ms,
//	               life=hex digits, number=1, mac=32 hex digits
//
// mac is HMAC-SHA256, truncated to 16 bytes, over lines: "headcount-request-1", method, host, request target, the
// Content-Digest and the Authorization up to ", mac". life is a random number that the client chooses at its start, and
// number counts its requests: the server accepts each number once, for as long as its time is accepted. Answers are not
// signed. Without secrets, key and mac are zeros.
package rpc

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
	"headcount/presence/seal"
)

const (
	updatesPath = "/updates"
	holdPath    = "/hold"
	reportPath  = "/report"
	usersPath   = "/users"
	explainPath = "/explain"

	maxBody = 4 << 20 // bytes of a request's body; a longer body gets status 413
	maxName = 128
	scheme  = "Headcount"
	// format is the number of the format of requests. Format 1 had counts instead of
	// updates, and its headers did not name the format.
	format  = 2
	purpose = "cluster"
)

// ErrConfig is in every error about settings that cannot work.
var ErrConfig = seal.ErrConfig

// Reasons to refuse a request. Package seal has further reasons.
var (
	ErrFormat = seal.NewRefusal("format",
		"the request is of another format than this version's; run the same version everywhere")
	ErrUnsigned    = seal.NewRefusal("unsigned", "the Authorization header is missing or malformed")
	ErrMisdirected = seal.NewRefusal("misdirected", "the request was sent to another process")
	ErrDigest      = seal.NewRefusal("digest", "the body is not the one that was signed")
	ErrOversized   = seal.NewRefusal("oversized", "the body is too long")
	ErrTruncated   = seal.NewRefusal("truncated", "the body is truncated")
	ErrMalformed   = seal.NewRefusal("malformed", "the body is malformed")
	ErrLate        = seal.NewRefusal("late", "the caller has given up")
)

// Codes of problems.
const (
	codeTooMany     = "too_many"
	codeUnavailable = "unavailable"
	codeNotOwner    = "not_owner"
	codeOvertaken   = "overtaken"
	codeInternal    = "internal"
)

// credentials are the parsed Authorization header.
type credentials struct {
	key         seal.ID
	from        string
	at          int64
	incarnation uint64
	number      uint64
}

// header returns the Authorization header without the mac.
func (c credentials) header() string {
	return fmt.Sprintf("%s%d, key=%x, from=%q, time=%d, life=%x, number=%d",
		formatPart, format, c.key, c.from, c.at, c.incarnation, c.number)
}

const (
	formatPart = scheme + " format="
	macPart    = ", mac="
)

// otherFormat reports whether an Authorization header is of another format.
func otherFormat(header string) bool {
	// Only the first field counts: all that follows may be different in another format.
	ours, _, _ := strings.Cut(header, ", ")

	return strings.HasPrefix(header, scheme+" ") && ours != formatPart+strconv.Itoa(format)
}

// signed returns the text that the mac signs.
func signed(method, host, target, digest, header string) []byte {
	return []byte(strings.Join([]string{"headcount-request-1", method, host, target, digest, header}, "\n"))
}

// parseCredentials parses the Authorization header. It accepts only the exact form that
// header writes: any other form would have another mac.
func parseCredentials(s string) (c credentials, header string, mac []byte, ok bool) {
	header, hexMac, found := strings.Cut(s, macPart)
	// The signature is not verified yet, so anybody may have sent this.
	if !found || len(s) > 1024 {
		return c, "", nil, false
	}

	mac, err := hex.DecodeString(hexMac)
	if err != nil || len(mac) != seal.Size {
		return c, "", nil, false
	}

	rest, found := strings.CutPrefix(header, formatPart+strconv.Itoa(format)+", ")
	parts := strings.Split(rest, ", ")
	if !found || len(parts) != 5 {
		return c, "", nil, false
	}

	for i, name := range []string{"key=", "from=", "time=", "life=", "number="} {
		parts[i], found = strings.CutPrefix(parts[i], name)
		if !found {
			return c, "", nil, false
		}
	}

	key, err := hex.DecodeString(parts[0])
	if err != nil || len(key) != seal.IDSize {
		return c, "", nil, false
	}
	c.key = seal.ID(key)

	var errs [4]error
	c.from, errs[0] = strconv.Unquote(parts[1])
	c.at, errs[1] = strconv.ParseInt(parts[2], 10, 64)
	c.incarnation, errs[2] = strconv.ParseUint(parts[3], 16, 64)
	c.number, errs[3] = strconv.ParseUint(parts[4], 10, 64)
	if errors.Join(errs[:]...) != nil || checkName(c.from) != nil {
		return c, "", nil, false
	}

	return c, header, mac, true
}

// checkName says why a process cannot have the name, or returns nil. A header has
// the name in quotes and between commas.
func checkName(name string) error {
	unfit := func(r rune) bool { return r <= ' ' || r > '~' || r == '"' || r == '\\' || r == ',' }
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, unfit) {
		return fmt.Errorf("rpc: %w: the name %q is not an address", ErrConfig, presence.Excerpt(name))
	}

	return nil
}

// wireUpdates are updates as JSON.
type wireUpdates struct {
	Updates []wireUpdate `json:"updates"`
}

type wireUpdate struct {
	Topic       string `json:"topic"`
	Incarnation uint64 `json:"incarnation"`
	Sequence    uint64 `json:"sequence"`
	Stale       bool   `json:"stale,omitempty"`
	Value       string `json:"value,omitempty"`
}

func parseUpdates(body []byte) ([]presence.Update, error) {
	var m wireUpdates
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}

	updates := make([]presence.Update, len(m.Updates))
	for i, w := range m.Updates {
		topic, err := presence.ParseTopic(w.Topic)
		if err != nil {
			return nil, err
		}

		updates[i] = presence.Update{
			Topic:   topic,
			Version: presence.Version{Incarnation: w.Incarnation, Sequence: w.Sequence},
			Stale:   w.Stale,
			Value:   w.Value,
		}
		// The client leaves invalid updates out. One that comes shows a faulty sender, so none is taken.
		if err := updates[i].Check(); err != nil {
			return nil, err
		}
	}

	return updates, nil
}

// wireHold is a hold as JSON.
type wireHold struct {
	User string `json:"user"` // 16 hex digits: some readers of JSON do not keep 64-bit numbers exact
	Page string `json:"page"`
	On   *bool  `json:"on"`
	// Asked is when the gateway received the call, by the time of the cluster, unix ms. Releases before this one do not
	// send it.
	Asked int64 `json:"asked,omitempty"`
}

// parseHold parses a change of a hold. now is the time of the cluster; the process that sent the change may be some
// milliseconds ahead of it.
func parseHold(body []byte, now time.Time) (change presence.HoldChange, err error) {
	var m wireHold
	if err := json.Unmarshal(body, &m); err != nil {
		return change, err
	}
	change.User, err = parseUser(m.User)
	if err != nil {
		return change, err
	}
	// A missing member must not count as false, which would end the hold.
	if m.On == nil {
		return change, errors.New("on is missing")
	}

	age := time.Duration(0) // of a release whose clock may be wrong: the change counts as asked for when it arrives
	if m.Asked != 0 {
		age = max(now.Sub(time.UnixMilli(m.Asked)), 0)
	}
	change.Page = m.Page
	change.On = *m.On
	// By the clock of this machine, with which the owner compares.
	change.Asked = time.Now().Add(-age)

	return change, presence.CheckName(m.Page)
}
