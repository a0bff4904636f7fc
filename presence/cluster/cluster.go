// Package cluster is what the processes of a region ask of each other by HTTP:
// dispatchers push counts to gateways, gateways have holds taken by presence
// nodes, and ask everybody how it is for a dashboard.
//
//	PUT /v1/counts  {"counts":[{"page":"p","users":3,"updated":1700000000,"incarnation":1,"sequence":2,"stale":true}]}
//	PUT /v1/hold    {"user":"00000000000000ff","page":"p","on":true}
//	PUT /v1/report  {}
//
// They answer 204, the last one 200 and a report, or a problem of RFC 9457 with a member "code". Members that
// are not known are ignored: the format is only ever added to. "updated", in
// unix seconds, is left out for a page nobody ever joined.
//
// A request is signed with the cluster's secret by two headers:
//
//	Content-Digest: sha-256=:base64 of the body's:            (RFC 9530)
//	Authorization: Headcount key=8 hex digits, from="name", time=unix ms,
//	               life=hex digits, number=1, mac=32 hex digits
//
// mac is HMAC-SHA256, truncated to 16 bytes, over lines: "headcount-request-1",
// method, host, request target, the Content-Digest and the Authorization up to
// ", mac". life is a random number of this life of the client, number counts
// its requests: each is taken once, within the time window. Answers are not
// signed. Without secrets key and mac are zeros.
package cluster

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/presence"
	"headcount/presence/cluster/seal"
)

const (
	countsPath = "/v1/counts"
	holdPath   = "/v1/hold"
	reportPath = "/v1/report"

	maxBody = 4 << 20 // of a request; longer ones are 413
	// batchBody is where a client cuts what it pushes into several requests.
	batchBody = 1 << 20
	maxName   = 128
	scheme    = "Headcount"
	purpose   = "cluster"
)

var (
	// ErrConfig is in every error about settings that cannot work.
	ErrConfig = seal.ErrConfig
	// ErrNotOwner says that the node asked does not own the user's partition now.
	ErrNotOwner = errors.New("the node does not own the partition")
)

// Why a request is not taken, beside those of package seal.
var (
	ErrUnsigned    = seal.NewRefusal("unsigned", "the Authorization header is missing or malformed")
	ErrMisdirected = seal.NewRefusal("misdirected", "meant for another process")
	ErrDigest      = seal.NewRefusal("digest", "the body is not the one that was signed")
	ErrOversized   = seal.NewRefusal("oversized", "the body is too long")
	ErrTruncated   = seal.NewRefusal("truncated", "the body was cut short")
	ErrMalformed   = seal.NewRefusal("malformed", "the body is not what it must be")
)

// Codes of problems, by which a client knows what they are about.
const (
	codeTooMany     = "too_many"
	codeUnavailable = "unavailable"
	codeNotOwner    = "not_owner"
	codeInternal    = "internal"
)

// credentials are the Authorization header, taken apart.
type credentials struct {
	key    seal.ID
	from   string
	at     int64
	life   uint64
	number uint64
}

// header is the Authorization header but for the mac.
func (c credentials) header() string {
	return fmt.Sprintf("%s key=%x, from=%q, time=%d, life=%x, number=%d", scheme, c.key, c.from, c.at, c.life, c.number)
}

const macPart = ", mac="

// signed is what the mac is of.
func signed(method, host, target, digest, header string) []byte {
	return []byte(strings.Join([]string{"headcount-request-1", method, host, target, digest, header}, "\n"))
}

// parseCredentials reads the Authorization header. It takes what header writes
// and nothing else: the rest would not have that mac.
func parseCredentials(s string) (c credentials, header string, mac []byte, ok bool) {
	header, hexMac, found := strings.Cut(s, macPart)
	if !found || len(s) > 1024 {
		return c, "", nil, false
	}
	mac, err := hex.DecodeString(hexMac)
	if err != nil || len(mac) != seal.Size {
		return c, "", nil, false
	}
	rest, found := strings.CutPrefix(header, scheme+" ")
	parts := strings.Split(rest, ", ")
	if !found || len(parts) != 5 {
		return c, "", nil, false
	}
	for i, name := range []string{"key=", "from=", "time=", "life=", "number="} {
		if parts[i], found = strings.CutPrefix(parts[i], name); !found {
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
	c.life, errs[2] = strconv.ParseUint(parts[3], 16, 64)
	c.number, errs[3] = strconv.ParseUint(parts[4], 10, 64)
	if errors.Join(errs[:]...) != nil || checkName(c.from) != nil {
		return c, "", nil, false
	}
	return c, header, mac, true
}

// checkName says why a process cannot have that name. A name stands in quotes
// in a header, and between commas.
func checkName(name string) error {
	if name == "" || len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r > '~' || r == '"' || r == '\\' || r == ','
	}) {
		return fmt.Errorf("cluster: %w: the name %q is not an address", ErrConfig, presence.Excerpt(name))
	}
	return nil
}

// wireCount is a presence.Count as JSON.
type wireCount struct {
	Page        string `json:"page"`
	Users       int64  `json:"users"`
	Updated     *int64 `json:"updated"`
	Incarnation uint64 `json:"incarnation"`
	Sequence    uint64 `json:"sequence"`
	Stale       bool   `json:"stale"`
	Without     string `json:"without"`
}

// appendCount appends c as JSON. Its page has passed CheckTopic.
func appendCount(b []byte, c *presence.Count) []byte {
	b = append(b, `{"page":`...)
	b = presence.AppendString(b, c.Page)
	b = append(b, `,"users":`...)
	b = strconv.AppendInt(b, c.Users, 10)
	if !c.Updated.IsZero() {
		b = append(b, `,"updated":`...)
		b = strconv.AppendInt(b, c.Updated.Unix(), 10)
	}
	b = append(b, `,"incarnation":`...)
	b = strconv.AppendUint(b, c.Version.Incarnation, 10)
	b = append(b, `,"sequence":`...)
	b = strconv.AppendUint(b, c.Version.Sequence, 10)
	if c.Stale {
		b = append(b, `,"stale":true`...)
	}
	if c.Without != "" {
		b = append(b, `,"without":`...)
		b = presence.AppendString(b, c.Without)
	}
	return append(b, '}')
}

const (
	countsHead = `{"counts":[`
	countsTail = `]}`
)

// batch makes the body of one request of the front of counts, as many as fit,
// and returns the rest. Counts that cannot be are left out, and noted in err.
func batch(counts []presence.Count) (body []byte, rest []presence.Count, err error) {
	body = append(make([]byte, 0, min(128*len(counts)+64, batchBody+1024)), countsHead...)
	for len(counts) > 0 && len(body) < batchBody {
		c := &counts[0]
		counts = counts[1:]
		if e := checkCount(c.Page, c.Users); e != nil {
			err = e
			continue
		}
		if len(body) > len(countsHead) {
			body = append(body, ',')
		}
		body = appendCount(body, c)
	}
	return append(body, countsTail...), counts, err
}

func checkCount(page string, users int64) error {
	if err := presence.CheckTopic(page); err != nil {
		return err
	}
	if users < 0 {
		return fmt.Errorf("the count of %q is negative", page)
	}
	return nil
}

func parseCounts(body []byte) ([]presence.Count, error) {
	var m struct {
		Counts []wireCount `json:"counts"`
	}
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	counts := make([]presence.Count, len(m.Counts))
	for i, w := range m.Counts {
		if err := checkCount(w.Page, w.Users); err != nil {
			return nil, err
		}
		counts[i] = presence.Count{
			Page: w.Page, Users: w.Users, Stale: w.Stale, Without: w.Without,
			Version: presence.Version{Incarnation: w.Incarnation, Sequence: w.Sequence},
		}
		if w.Updated != nil {
			counts[i].Updated = time.Unix(*w.Updated, 0).UTC()
		}
	}
	return counts, nil
}

// wireHold is a hold as JSON.
type wireHold struct {
	User string `json:"user"` // 16 hex digits: JSON's numbers are not that exact everywhere
	Page string `json:"page"`
	On   *bool  `json:"on"`
}

func parseHold(body []byte) (u presence.User, page string, on bool, err error) {
	var m wireHold
	if err := json.Unmarshal(body, &m); err != nil {
		return 0, "", false, err
	}
	n, err := strconv.ParseUint(m.User, 16, 64)
	if err != nil || len(m.User) != 16 {
		return 0, "", false, errors.New("user must be 16 hex digits")
	}
	if m.On == nil {
		return 0, "", false, errors.New("on is missing")
	}
	return presence.User(n), m.Page, *m.On, presence.CheckPage(m.Page)
}
