package gateway

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"iter"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/golang-jwt/jwt/v5"

	"headcount/presence"
)

// Where an anonymous id travels: the cookie for pages of the same site, the
// header and the query parameter "id" for pages on another origin.
const (
	IDCookie = "headcount_id"
	IDHeader = "Headcount-Id"
)

// Bounds of what a request may present. Beyond maxToken or maxSub a token is
// bad; of more than maxIDs ids of the right shape the rest is not looked at,
// so that a request full of forged ids costs no more than a few hashes.
const (
	maxToken = 8 << 10 // bytes of a token
	maxSub   = 256     // bytes of a token's sub
	maxIDs   = 8       // signed ids tried in one request
)

// Clocks of issuers run a little ahead of ours: a token counts from this long
// before its nbf. Its exp has no leeway.
const nbfLeeway = time.Second

// A signed id is 16 random bytes and the first 16 bytes of its signature,
// each in unpadded base64url, joined by a dot.
const (
	idBytes   = 16
	idLen     = (idBytes*8 + 5) / 6
	signedLen = idLen + 1 + idLen
)

// What a secret is used for stands in front of what is hashed, so that no use
// of it yields a value of another.
const (
	domainID      = "headcount id v1\x00"
	domainHash    = "headcount user 64 v1\x00"
	domainHash128 = "headcount user 128 v1\x00"
)

// What Identify answers, to be asked with errors.Is. None of the texts repeats
// anything of the token.
var (
	ErrNoToken  = errors.New("no token: this server knows its users by a JWT")
	ErrBadToken = errors.New("bad token")
	// ErrKeysAway: the token cannot be judged, since no signing key could ever
	// be fetched. It says nothing about the token; the mend is to try again.
	ErrKeysAway = errors.New("the keys that tokens are signed with cannot be fetched now")
)

func badToken(why string) error { return fmt.Errorf("%w: %s", ErrBadToken, why) }

// IdentityConfig says who may say who they are.
type IdentityConfig struct {
	IDSecrets [][]byte         // the first signs ids, all verify, the last keys the user hashes; at least one, none empty
	JWTSecret []byte           // HS256; empty: no such tokens
	JWKSURL   string           // where the public keys for RS256, ES256 and EdDSA are; empty: no such tokens. Both may be set
	Client    *http.Client     // fetches JWKSURL; default one with a timeout of 5s
	Now       func() time.Time // default time.Now
	KeysError func(error)      // told when fetching JWKSURL went wrong, from one goroutine at a time, at most every 5s on average; default: nobody
}

// Identity is one user as a request shows it.
type Identity struct {
	User    string        // the token's sub, or the anonymous id without its signature
	Signed  string        // the anonymous id with its signature, for cookie and welcome; empty with a token
	Fresh   bool          // the anonymous id was issued by this call: the request carried no valid one
	Hash    presence.User // what presence knows the user by
	Expires time.Time     // when the token ends; zero: never
}

// Identities finds out who requests are from. It is safe for use by many
// goroutines at once.
type Identities struct {
	macs    []*keyedMAC // one per secret, in the order of IdentityConfig.IDSecrets
	secret  []byte      // for HS256
	keys    *keySource
	methods []string
	parser  *jwt.Parser
	now     func() time.Time
}

// NewIdentities returns Identities that fetch nothing before the first token
// needs it. Close ends them.
func NewIdentities(cfg IdentityConfig) (*Identities, error) {
	ids := &Identities{secret: slices.Clone(cfg.JWTSecret), now: cfg.Now}
	if ids.now == nil {
		ids.now = time.Now
	}
	if len(cfg.IDSecrets) == 0 {
		return nil, errors.New("id-secret: at least one is needed")
	}
	for _, secret := range cfg.IDSecrets {
		if len(secret) == 0 {
			return nil, errors.New("id-secret: one of them is empty; leave it out or give it a value")
		}
		ids.macs = append(ids.macs, newMAC(secret))
	}
	if len(ids.secret) > 0 {
		ids.methods = append(ids.methods, jwt.SigningMethodHS256.Alg())
	}
	if cfg.JWKSURL != "" {
		var err error
		if ids.keys, err = newKeySource(cfg.JWKSURL, cfg.Client, ids.now, cfg.KeysError); err != nil {
			return nil, err
		}
		ids.methods = append(ids.methods, keyMethods...)
	}
	// Times are checked here, not by the parser: its leeway is one for both.
	ids.parser = jwt.NewParser(jwt.WithValidMethods(ids.methods), jwt.WithStrictDecoding(), jwt.WithoutClaimsValidation())
	return ids, nil
}

// Close stops fetching keys and waits until that has stopped. Identify still
// works, with the keys it has.
func (ids *Identities) Close() {
	if ids.keys != nil {
		ids.keys.close()
	}
}

// TokensRequired reports whether users are known by tokens; without it
// everyone is anonymous.
func (ids *Identities) TokensRequired() bool { return len(ids.methods) > 0 }

// Identify finds who r is from. query says whether the parameters id and token
// count, as they do in the URLs of WebSocket and SSE. An error wraps
// ErrNoToken, ErrBadToken or ErrKeysAway; without JWT settings there is none.
// It may wait for a fetch of keys, no longer than r's context.
func (ids *Identities) Identify(r *http.Request, query bool) (Identity, error) {
	if !ids.TokensRequired() {
		return ids.anonymous(r, query), nil
	}
	token, ok := presentedToken(r, query)
	if !ok {
		return Identity{}, ErrNoToken
	}
	return ids.fromToken(r.Context(), token)
}

// CheckToken is Identify for what is public: it refuses a bad token and lets
// everyone else pass, without issuing an id.
func (ids *Identities) CheckToken(r *http.Request, query bool) error {
	if !ids.TokensRequired() {
		return nil
	}
	if _, err := ids.Identify(r, query); err != nil && !errors.Is(err, ErrNoToken) {
		return err
	}
	return nil
}

// Hash is what presence knows user by: the first 64 bits of a keyed hash.
func (ids *Identities) Hash(user string) presence.User {
	sum := ids.macs[len(ids.macs)-1].sum(domainHash, user)
	return presence.User(binary.BigEndian.Uint64(sum[:]))
}

// Hash128 is what follows know user by: the first 128 bits of a keyed hash
// that has nothing in common with Hash.
func (ids *Identities) Hash128(user string) [16]byte {
	sum := ids.macs[len(ids.macs)-1].sum(domainHash128, user)
	return [16]byte(sum[:16])
}

// SetCookie adds the cookie that brings an anonymous id back, for a year from
// now; for a user with a token it does nothing. It also leaves a valid cookie
// of another id alone: an id from a URL holds for that request, a link must
// not be able to exchange a visitor's own.
func (ids *Identities) SetCookie(w http.ResponseWriter, r *http.Request, id Identity, secure bool) {
	if id.Signed == "" {
		return
	}
	if !id.Fresh {
		if user, ok := ids.fromCookie(r); ok && user != id.User {
			return
		}
	}
	http.SetCookie(w, &http.Cookie{
		Name:     IDCookie,
		Value:    id.Signed,
		Path:     "/",
		MaxAge:   365 * 24 * 60 * 60,
		HttpOnly: true,
		SameSite: http.SameSiteLaxMode,
		Secure:   secure,
	})
}

// anonymous returns the user of the first valid id: the explicit ones come
// first, then the cookies; without one it issues a new id.
func (ids *Identities) anonymous(r *http.Request, query bool) Identity {
	tries := maxIDs
	if query {
		for v := range queryValues(r.URL.RawQuery, "id") {
			if id, ok := ids.verify(v, &tries); ok {
				return id
			}
		}
	}
	for _, v := range r.Header[IDHeader] {
		if id, ok := ids.verify(v, &tries); ok {
			return id
		}
	}
	for v := range cookieValues(r.Header["Cookie"], IDCookie) {
		if id, ok := ids.verify(v, &tries); ok {
			return id
		}
	}
	return ids.issue()
}

// fromCookie is the user of the first valid cookie.
func (ids *Identities) fromCookie(r *http.Request) (string, bool) {
	tries := maxIDs
	for v := range cookieValues(r.Header["Cookie"], IDCookie) {
		if id, ok := ids.verify(v, &tries); ok {
			return id.User, true
		}
	}
	return "", false
}

func (ids *Identities) issue() Identity {
	var random [idBytes]byte
	rand.Read(random[:]) // never fails; the runtime ends the process instead
	var id [idLen]byte
	base64.RawURLEncoding.Encode(id[:], random[:])
	signed := ids.macs[0].sign(string(id[:]))
	return Identity{User: signed[:idLen], Signed: signed, Fresh: true, Hash: ids.Hash(signed[:idLen])}
}

// verify returns the user of a signed id. The id it returns is signed by the
// first secret, whichever signed the one presented, and shares no memory with
// it: a connection keeps it long after the request is gone.
func (ids *Identities) verify(presented string, tries *int) (Identity, bool) {
	if len(presented) != signedLen || presented[idLen] != '.' || *tries <= 0 {
		return Identity{}, false
	}
	*tries--
	current := ids.macs[0].sign(presented[:idLen])
	valid := hmac.Equal([]byte(current), []byte(presented))
	for _, m := range ids.macs[1:] {
		if valid {
			break
		}
		valid = hmac.Equal([]byte(m.sign(presented[:idLen])), []byte(presented))
	}
	if !valid {
		return Identity{}, false
	}
	return Identity{User: current[:idLen], Signed: current, Hash: ids.Hash(current[:idLen])}, true
}

// fromToken returns the user a token names.
func (ids *Identities) fromToken(ctx context.Context, raw string) (Identity, error) {
	switch {
	case raw == "":
		return Identity{}, badToken("it is empty")
	case len(raw) > maxToken:
		return Identity{}, badToken("it is too long")
	}
	claims, err := ids.verifyToken(ctx, raw)
	if err != nil {
		return Identity{}, err
	}
	expires, err := checkTimes(claims, ids.now())
	if err != nil {
		return Identity{}, err
	}
	sub, err := subject(claims)
	if err != nil {
		return Identity{}, err
	}
	return Identity{User: sub, Hash: ids.Hash(sub), Expires: expires}, nil
}

// verifyToken returns the claims of a token whose signature holds. The claims
// are a map since a struct would take a member "SUB" for "sub".
func (ids *Identities) verifyToken(ctx context.Context, raw string) (jwt.MapClaims, error) {
	var keyErr error  // why there was no key to verify with
	var tried *keySet // the set that held no key named by the token, only keys that may have signed it
	find := func(t *jwt.Token) (any, error) {
		var key any
		key, tried, keyErr = ids.findKey(ctx, t)
		return key, keyErr
	}
	for attempt := 1; ; attempt++ {
		claims := jwt.MapClaims{}
		keyErr, tried = nil, nil
		token, err := ids.parser.ParseWithClaims(raw, claims, find)
		switch {
		case err == nil:
			return claims, nil
		case keyErr != nil:
			return nil, keyErr
		case errors.Is(err, jwt.ErrTokenMalformed):
			return nil, badToken("it is malformed")
		case token == nil || token.Method == nil || !slices.Contains(ids.methods, token.Method.Alg()):
			return nil, badToken("its algorithm is not accepted")
		case attempt > 1 || tried == nil || !ids.keys.renew(ctx, tried):
			return nil, badToken("its signature is wrong")
		}
		// The keys were others than a moment ago: it may be signed by a new one.
	}
}

// findKey returns what to verify t with. It is asked only for the accepted
// algorithms; which key goes with which is decided here, so a public key never
// serves as a secret. The set is returned when trying another one might help.
func (ids *Identities) findKey(ctx context.Context, t *jwt.Token) (any, *keySet, error) {
	if _, critical := t.Header["crit"]; critical {
		return nil, nil, badToken("it demands extensions that are not known") // RFC 7515, 4.1.11
	}
	if t.Method == jwt.SigningMethodHS256 {
		return ids.secret, nil, nil
	}
	kid, _ := t.Header["kid"].(string)
	return ids.keys.find(ctx, t.Method.Alg(), kid)
}

// checkTimes returns when the token ends, zero for never, or why it does not
// count now.
func checkTimes(claims jwt.MapClaims, now time.Time) (expires time.Time, err error) {
	if v, ok := claims["exp"]; ok {
		if expires, ok = numericDate(v); !ok {
			return time.Time{}, badToken("its exp is not a number")
		}
		if !now.Before(expires) {
			return time.Time{}, badToken("it is expired")
		}
	}
	if v, ok := claims["nbf"]; ok {
		from, ok := numericDate(v)
		if !ok {
			return time.Time{}, badToken("its nbf is not a number")
		}
		if now.Add(nbfLeeway).Before(from) {
			return time.Time{}, badToken("it is not valid yet")
		}
	}
	return expires, nil
}

// numericDate reads seconds since 1970. What lies beyond the year 36000 on
// either side is taken to lie there, where time.Time still reckons rightly.
func numericDate(v any) (time.Time, bool) {
	f, ok := v.(float64)
	if !ok {
		return time.Time{}, false
	}
	const far = 1 << 40
	seconds, fraction := math.Modf(max(-far, min(far, f)))
	return time.Unix(int64(seconds), int64(fraction*1e9)), true
}

// subject returns the sub. Control characters are refused since it stands in
// logs of others and in frames, U+FFFD since different broken texts become it.
func subject(claims jwt.MapClaims) (string, error) {
	sub, ok := claims["sub"].(string)
	switch {
	case !ok || sub == "":
		return "", badToken("it has no sub, or one that is not text")
	case len(sub) > maxSub:
		return "", badToken("its sub is too long")
	case strings.ContainsFunc(sub, func(c rune) bool { return c == utf8.RuneError || unicode.IsControl(c) }):
		return "", badToken("its sub is not plain text")
	}
	return sub, nil
}

// presentedToken returns the token of r and whether there is one. The header
// goes before the query; an empty token was presented too, and is bad.
func presentedToken(r *http.Request, query bool) (string, bool) {
	for _, v := range r.Header["Authorization"] {
		scheme, token, _ := strings.Cut(strings.TrimSpace(v), " ")
		if strings.EqualFold(scheme, "Bearer") {
			return strings.TrimSpace(token), true
		}
	}
	if query {
		for v := range queryValues(r.URL.RawQuery, "token") {
			return v, true
		}
	}
	return "", false
}

// queryValues yields the values of one parameter, in order. Unlike url.Query
// it builds no map; like it, it passes over what is badly escaped or holds a
// semicolon.
func queryValues(raw, name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for raw != "" {
			var pair string
			pair, raw, _ = strings.Cut(raw, "&")
			key, value, _ := strings.Cut(pair, "=")
			if strings.Contains(pair, ";") || !unescapesTo(key, name) {
				continue
			}
			if value, err := url.QueryUnescape(value); err == nil && !yield(value) {
				return
			}
		}
	}
}

func unescapesTo(key, name string) bool {
	if key == name {
		return true
	}
	if !strings.ContainsAny(key, "%+") {
		return false
	}
	key, err := url.QueryUnescape(key)
	return err == nil && key == name
}

// cookieValues yields the values of one cookie, in the order sent; a browser
// sends several when it holds them for several paths or domains.
func cookieValues(lines []string, name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range lines {
			for line != "" {
				var pair string
				pair, line, _ = strings.Cut(line, ";")
				key, value, ok := strings.Cut(pair, "=")
				if !ok || strings.TrimSpace(key) != name {
					continue
				}
				value = strings.TrimSpace(value)
				if len(value) > 1 && value[0] == '"' && value[len(value)-1] == '"' {
					value = value[1 : len(value)-1]
				}
				if !yield(value) {
					return
				}
			}
		}
	}
}

// keyedMAC computes HMAC-SHA256 under one secret. A hash that was used once starts
// again from saved state, which a pool keeps; safe for use by many goroutines.
type keyedMAC struct{ pool sync.Pool }

type macState struct {
	hash hash.Hash
	in   []byte
	out  [sha256.Size]byte
}

func newMAC(secret []byte) *keyedMAC {
	secret = slices.Clone(secret)
	return &keyedMAC{pool: sync.Pool{New: func() any {
		return &macState{hash: hmac.New(sha256.New, secret)}
	}}}
}

func (m *keyedMAC) sum(domain, text string) [sha256.Size]byte {
	s := m.pool.Get().(*macState)
	s.in = append(append(s.in[:0], domain...), text...)
	s.hash.Reset()
	s.hash.Write(s.in)
	s.hash.Sum(s.out[:0])
	out := s.out
	if cap(s.in) <= 1024 { // one long text must not be kept for ever
		m.pool.Put(s)
	}
	return out
}

// sign returns id with its signature.
func (m *keyedMAC) sign(id string) string {
	sum := m.sum(domainID, id)
	var buf [signedLen]byte
	b := append(buf[:0], id...)
	b = append(b, '.')
	return string(base64.RawURLEncoding.AppendEncode(b, sum[:idBytes]))
}
