// Package identity identifies the sender of a request by a signed anonymous id, a token
// or an API key. It also checks the request's origin and its proxies.
package identity

import (
	"bytes"
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"hash"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"headcount/presence"
)

// Names by which a request carries an anonymous id: the cookie from pages on the server's own
// origin, the header or the query parameter "id" from pages on another origin. Cookie is the
// cookie of the default site, unless Config names another one; cookieOf returns the names for
// other sites.
const (
	Cookie = "headcount_id"
	Header = "Headcount-Id"
)

// SeedCookie begins the names of the cookies in which pages on the server's own origin present a seed. The
// browser client writes one before its first call and lets it expire within a minute.
//
// Each tab's has a name of its own: two tabs that open at once may both find none and write one. If the later
// replaced the earlier, a call that the earlier tab had made already would be another user's. A browser sends
// the cookies of one path in the order in which they were made (RFC 6265, section 5.4), so the first one that
// was written counts for both tabs.
const SeedCookie = "headcount_new"

// seedPrefix begins a seed: an unsigned id that a client makes up for itself before it has one. No
// issued id begins so, except with a probability of 2^-128.
const seedPrefix = "0000000000000000000000."

// Values of the URL's parameter "storage". A script has no other way to name them for a WebSocket.
const (
	storageNone        = "none"        // no cookie is read or set
	storagePartitioned = "partitioned" // the page is in a frame of another site
)

// Bounds of the credentials in a request. A token beyond maxToken or maxUser is bad.
// Only the first maxIDs ids of the right shape are verified, so a request full of
// forged ids costs no more than a few hashes.
const (
	maxToken = 8 << 10 // bytes of a token
	maxUser  = 256     // bytes of a token's sub
	maxIDs   = 8       // signed ids tried in one request
)

// A signed id is 16 random bytes and the first 16 bytes of its signature,
// each in unpadded base64url, joined by a dot.
const (
	idBytes   = 16
	idLen     = (idBytes*8 + 5) / 6
	signedLen = idLen + 1 + idLen
)

// Each use of a secret has its own prefix of the hashed text, so that no use yields a
// value of another use.
const (
	domainID      = "headcount id v1\x00"
	domainHash    = "headcount user 64 v1\x00"
	domainHash128 = "headcount user 128 v1\x00"
	domainDerived = "headcount derived id v1\x00"
)

// Config configures how users are identified. JWTSecret and JWKSURL may both be set; without
// either, users are anonymous.
type Config struct {
	IDSecrets [][]byte         // the first signs ids, all verify; at least one, none empty
	HashKey   []byte           // key of the user hashes; empty: SetHashKey sets it before the first request
	Cookie    string           // the name of the cookie of anonymous ids; default Cookie
	JWTSecret []byte           // verifies HS256 tokens, with or without white space around it; empty: they are refused
	JWKSURL   string           // has the public keys for RS256, ES256 and EdDSA; empty: these tokens are refused
	Issuers   []string         // a token's iss must be one of them; empty: it may be any
	Audiences []string         // a token's aud must have one of them; empty: it may be any
	Sites     []presence.Site  // all sites of the server; an id of one of them says nothing on another
	Leeway    time.Duration    // how long before its nbf a token is valid: clocks of issuers may be ahead
	Now       func() time.Time // default time.Now
	// KeysError is called after a fetch of JWKSURL failed, by one goroutine at a time, at most
	// every 5s on average. It may be nil.
	KeysError func(error)
}

// Identity is the user of a request.
type Identity struct {
	User    string        // the token's sub, or the anonymous id without its signature
	Signed  string        // the anonymous id with its signature, for cookie and welcome; empty with a token
	Fresh   bool          // this call issued the anonymous id, since the request carried no valid one
	Derived bool          // Fresh, and made of a seed or an invalid id: other calls of the client get the same id
	Void    bool          // the request carried anonymous ids, and none was valid
	Linked  bool          // the anonymous id was in the URL, which somebody else may have written
	Hash    presence.User // identifies the user in presence
	Site    presence.Site // of which this is a user
	Expires time.Time     // when the token expires; zero: never
	Pages   []string      // private pages that the token opens: pages, or prefixes and *
}

// Identities identifies the senders of requests. It is safe for use by many goroutines at
// once.
type Identities struct {
	cfg     Config
	macs    []*keyedMAC              // one per secret, in the order of Config.IDSecrets
	hash    atomic.Pointer[keyedMAC] // of users; SetHashKey changes it
	secrets jwt.VerificationKeySet   // of HS256 tokens
	keys    *keySource               // nil without Config.JWKSURL
	methods []string                 // algorithms that are accepted; empty: users are anonymous
	parser  *jwt.Parser
}

// New returns Identities. They fetch no keys before the first token needs one.
// The caller must call Close.
func New(cfg Config) *Identities {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	cfg.Cookie = cmp.Or(cfg.Cookie, Cookie)
	ids := &Identities{cfg: cfg}

	for _, secret := range cfg.IDSecrets {
		ids.macs = append(ids.macs, newMAC(secret))
	}

	// Never a known key, with which anybody could compute the hashes of users.
	if len(cfg.HashKey) == 0 {
		cfg.HashKey = []byte(rand.Text())
	}

	ids.SetHashKey(cfg.HashKey)

	if len(cfg.JWTSecret) > 0 {
		ids.methods = append(ids.methods, jwt.SigningMethodHS256.Alg())
		ids.secrets.Keys = append(ids.secrets.Keys, cfg.JWTSecret)

		// A file or a variable often ends with a newline, which the issuer of tokens may have, too, or may not.
		bare := bytes.TrimSpace(cfg.JWTSecret)
		if len(bare) > 0 && len(bare) < len(cfg.JWTSecret) {
			ids.secrets.Keys = append(ids.secrets.Keys, bare)
		}
	}
	if cfg.JWKSURL != "" {
		ids.keys = newKeySource(cfg.JWKSURL, cfg.Now, cfg.KeysError)
		ids.methods = append(ids.methods, keyMethods...)
	}

	// checkTimes checks the times: the parser has only one leeway for nbf and exp.
	ids.parser = jwt.NewParser(
		jwt.WithValidMethods(ids.methods), jwt.WithStrictDecoding(), jwt.WithoutClaimsValidation())

	return ids
}

// Close stops the fetching of keys and waits until it has stopped. Identify still
// works with the keys fetched before.
func (ids *Identities) Close() {
	if ids.keys != nil {
		ids.keys.close()
	}
}

// tokensRequired reports whether users must have tokens. If not, every user is
// anonymous.
func (ids *Identities) tokensRequired() bool { return len(ids.methods) > 0 }

// Identify returns the user who sent r to a site. query permits the URL's parameters id
// and token, which WebSocket and SSE use. An error wraps ErrNoToken, ErrBadToken or
// ErrKeysAway. Without JWT settings there is never an error. Identify may wait for a fetch
// of keys, but no longer than r's context lasts.
//
// The same person is a different user on each site. An anonymous id belongs to one site: it is
// signed for that site and has a cookie of its own. So the pages of a site, which learn the ids
// of their visitors, cannot act as these visitors on another site, and two sites cannot tell
// that they have the same visitor. A token is valid on every site.
func (ids *Identities) Identify(r *http.Request, site presence.Site, query bool) (Identity, error) {
	if !ids.tokensRequired() {
		// A token means nothing to a server without settings for tokens.
		return ids.anonymous(r, site, query), nil
	}

	id, err := ids.fromRequest(r, query)
	if err == nil {
		id = ids.in(site, id)
	}

	return id, err
}

// fromRequest returns the user of the default site that r's token names.
func (ids *Identities) fromRequest(r *http.Request, query bool) (Identity, error) {
	token, ok := presentedToken(r, query)
	if !ok {
		return Identity{}, ErrNoToken
	}

	return ids.fromToken(r.Context(), token)
}

// CheckToken is Identify for public resources: it returns an error for a bad token, but none
// for a request that Nobody applies to. It looks for a token in the header alone, and issues no id.
func (ids *Identities) CheckToken(r *http.Request) error {
	if !ids.tokensRequired() {
		return nil
	}

	_, err := ids.fromRequest(r, false)
	if err != nil && !Nobody(err) {
		return err
	}

	return nil
}

// Nobody reports whether an error of Identify is of a request that names nobody, so that it may
// still use what is public: it has no token, or one that somebody else signed, such as that of a
// proxy which authenticates its clients by itself. A bad or expired token of our own issuer is refused everywhere.
func Nobody(err error) bool { return errors.Is(err, ErrNoToken) || errors.Is(err, errOthers) }

// in returns id as the user of a site.
func (ids *Identities) in(site presence.Site, id Identity) Identity {
	id.Site = site
	id.Hash = ids.Hash(site.Qualify(id.User))

	return id
}

// cookieOf returns the name of the cookie that holds the anonymous id of a site, where that of
// the default site has name.
func cookieOf(name string, site presence.Site) string {
	if site == presence.DefaultSite {
		return name
	}

	return name + "_" + site.String()
}

// SetHashKey sets the key of the user hashes. It must be called before the first request.
func (ids *Identities) SetHashKey(key []byte) { ids.hash.Store(newMAC(key)) }

// Hash identifies user in presence: it is the first 64 bits of a keyed hash. For users of
// another site than the default one, user is their presence.Site.Qualify.
func (ids *Identities) Hash(user string) presence.User {
	sum := ids.hash.Load().sum(domainHash, user)

	return presence.User(binary.BigEndian.Uint64(sum[:]))
}

// Hash128 identifies user in follows: it is the first 128 bits of a keyed hash that
// is independent of Hash.
func (ids *Identities) Hash128(user string) [16]byte {
	sum := ids.hash.Load().sum(domainHash128, user)

	return [16]byte(sum[:16])
}

// SetCookie adds a cookie with the anonymous id, for a year from now. For a user
// with a token it does nothing. An id from a URL is valid for that request alone:
// a link must not give a visitor the id of the link's author. An id never replaces
// a different id that a valid cookie holds. A page that wants nothing stored gets no
// cookie.
func (ids *Identities) SetCookie(w http.ResponseWriter, r *http.Request, id Identity, secure bool) {
	if id.Signed == "" || storageIs(r, storageNone) {
		return
	}

	// Browsers keep a partitioned cookie only over TLS.
	framed := secure && storageIs(r, storagePartitioned)
	// A random id is issued only when the request has nothing usable, so it replaces no other.
	if !id.Fresh || id.Derived {
		tries := maxIDs
		// Counted anew: other ids of the request may have used up the tries.
		held, ok := ids.fromCookie(r, id.Site, &tries, ids.cookiesOf(id.Site)...)
		if ok && held.User != id.User {
			return
		}

		// Only a script of the server's own page sends its Origin and asks for a partition.
		trusted := framed && fromOwnPage(r, secure)
		if !ok && id.Linked && !trusted {
			return
		}
	}

	http.SetCookie(w, cookieFor(cookieOf(ids.cfg.Cookie, id.Site), id.Signed, 365*24*60*60, secure, framed))
}

// cookieFor returns a cookie, or with a negative age the deletion of one. Browsers delete a partitioned cookie only by
// another one.
func cookieFor(name, value string, age int, secure, framed bool) *http.Cookie {
	cookie := &http.Cookie{
		Name:     name,
		Value:    value,
		Path:     "/",
		MaxAge:   age,
		HttpOnly: true,
		SameSite: http.SameSiteLaxMode,
		Secure:   secure,
	}

	if framed {
		// Browsers neither store nor send another kind in a frame of another site.
		cookie.SameSite = http.SameSiteNoneMode
		cookie.Partitioned = true
	}

	return cookie
}

// fromOwnPage reports whether a script of a page on the server's own origin sent r.
func fromOwnPage(r *http.Request, secure bool) bool {
	from, ok := parseOrigin(r.Header.Get("Origin"))

	return ok && from == ownOrigin(r.Host, secure)
}

// ForgetCookie deletes the cookies of a site at a client that has sent them.
func (ids *Identities) ForgetCookie(w http.ResponseWriter, r *http.Request, site presence.Site, secure bool) {
	framed := secure && storageIs(r, storagePartitioned)
	for _, name := range ids.cookiesOf(site) {
		tries := maxIDs
		_, valid := ids.fromCookie(r, site, &tries, name)
		sent := len(r.CookiesNamed(name)) > 0
		// The cookie of another server on this host stays.
		ours := name == cookieOf(ids.cfg.Cookie, site) || valid

		if sent && ours {
			http.SetCookie(w, cookieFor(name, "", -1, secure, framed))
		}
	}
}

// cookiesOf returns the names of the cookies that may hold the anonymous id of a site: that of the settings, and the
// default name, under which visitors have it from before the settings had another.
func (ids *Identities) cookiesOf(site presence.Site) []string {
	if ids.cfg.Cookie == Cookie {
		return []string{cookieOf(Cookie, site)}
	}
	return []string{cookieOf(ids.cfg.Cookie, site), cookieOf(Cookie, site)}
}

// anonymous returns the user of the first valid id. It tries the URL first, then the header, then
// the cookies, unless the page wants nothing stored.
//
// If none is valid, the new id is made of the first one that the request presents. So all calls that a
// browser makes at its first visit, or after the server has lost its secret, are those of one user:
// they carry the same seed, or the same old id. A request that presents nothing gets a random id.
func (ids *Identities) anonymous(r *http.Request, site presence.Site, query bool) Identity {
	presented, linked := ids.presentedIDs(r, site, query)
	tries := maxIDs
	for i, text := range presented {
		if id, ok := ids.verify(text, site, &tries); ok {
			id.Linked = i < linked
			return id
		}
	}

	id := ids.issue(site)
	derivable := func(text string) bool { return shaped(text) && !ids.ofAnotherSite(text, site) }
	// Each may cost a hash for every site.
	first := presented[:min(len(presented), maxIDs)]
	if i := slices.IndexFunc(first, derivable); i >= 0 {
		id = ids.derive(presented[i], site)
		id.Linked = i < linked
	}

	id.Void = tries < maxIDs // something had the shape of an id, and was tried

	return id
}

// presentedIDs returns what r carries as anonymous ids or seeds, in the order in which they count. The
// first ones, linked in number, are from the URL.
func (ids *Identities) presentedIDs(r *http.Request, site presence.Site, query bool) (presented []string, linked int) {
	if query {
		presented = queryValues(r, "id")
	}
	linked = len(presented)

	presented = append(presented, r.Header[Header]...)
	if storageIs(r, storageNone) {
		return presented, linked
	}

	for _, name := range ids.cookiesOf(site) {
		presented = append(presented, cookieValues(r, name)...)
	}

	// Seeds come last: they count only for a browser that has no id yet.
	for _, c := range r.Cookies() {
		if strings.HasPrefix(c.Name, SeedCookie) {
			presented = append(presented, c.Value)
		}
	}

	return presented, linked
}

// storageIs reports whether the URL's parameter "storage" has a value.
func storageIs(r *http.Request, value string) bool {
	return slices.Contains(queryValues(r, "storage"), value)
}

// cookieValues returns the values of the cookies with a name. A browser sends several if it holds the
// cookie for several paths or domains.
func cookieValues(r *http.Request, name string) []string {
	var values []string
	for _, c := range r.CookiesNamed(name) {
		values = append(values, c.Value)
	}

	return values
}

// fromCookie returns the user of the first valid cookie with one of the names, if there is one.
func (ids *Identities) fromCookie(r *http.Request, site presence.Site, tries *int, names ...string) (Identity, bool) {
	for _, name := range names {
		for _, value := range cookieValues(r, name) {
			if id, ok := ids.verify(value, site, tries); ok {
				return id, true
			}
		}
	}

	return Identity{}, false
}

// issue returns a new user with a random id.
func (ids *Identities) issue(site presence.Site) Identity {
	var random [idBytes]byte
	rand.Read(random[:]) // never fails; the runtime ends the process instead

	return ids.made(random, site)
}

// ofAnotherSite reports whether text is a valid id of another site. That site knows it, and must not learn by it who
// its visitor is here.
func (ids *Identities) ofAnotherSite(text string, site presence.Site) bool {
	return slices.ContainsFunc(ids.cfg.Sites, func(other presence.Site) bool {
		if other == site {
			return false
		}

		tries := 1
		// Counted on its own, since anonymous bounds how many texts come here.
		_, valid := ids.verify(text, other, &tries)

		return valid
	})
}

// derive returns the new user that a seed or an invalid id stands for. No secret is part of the hash, so
// the user stays the same when the secrets change before the client has received the signed id.
func (ids *Identities) derive(presented string, site presence.Site) Identity {
	sum := sha256.Sum256([]byte(domainDerived + site.Qualify(presented)))
	id := ids.made([idBytes]byte(sum[:idBytes]), site)
	id.Derived = true

	return id
}

// made returns a new user with these bytes as its id.
func (ids *Identities) made(random [idBytes]byte, site presence.Site) Identity {
	var id [idLen]byte
	base64.RawURLEncoding.Encode(id[:], random[:])

	signed := ids.macs[0].sign(site, string(id[:]))

	return ids.in(site, Identity{User: signed[:idLen], Signed: signed, Fresh: true})
}

// shaped reports whether a text has the shape of a signed id.
func shaped(presented string) bool { return len(presented) == signedLen && presented[idLen] == '.' }

// verify returns the user of a signed id of a site, if the signature is valid. The returned
// id is always signed by the first secret. It shares no memory with presented: a
// connection keeps the id long after the request is gone.
func (ids *Identities) verify(presented string, site presence.Site, tries *int) (Identity, bool) {
	// A seed has the shape of an id, but no signature.
	if !shaped(presented) || strings.HasPrefix(presented, seedPrefix) || *tries <= 0 {
		return Identity{}, false
	}

	*tries--
	// Counted before the hash, which is the cost that maxIDs bounds.
	current := ids.macs[0].sign(site, presented[:idLen])

	valid := hmac.Equal([]byte(current), []byte(presented))
	// An id that an older secret has signed stays valid, and the client gets it signed anew.
	for _, m := range ids.macs[1:] {
		if valid {
			break
		}
		valid = hmac.Equal([]byte(m.sign(site, presented[:idLen])), []byte(presented))
	}

	if !valid {
		return Identity{}, false
	}

	return ids.in(site, Identity{User: current[:idLen], Signed: current}), true
}

// queryValues returns the values of one parameter of r's URL.
func queryValues(r *http.Request, name string) []string {
	if r.URL.RawQuery == "" { // the common case needs no map
		return nil
	}

	return r.URL.Query()[name]
}

// keyedMAC computes HMAC-SHA256 under one secret. A pool keeps used hashes, whose
// saved state makes the next start cheap. It is safe for use by many goroutines.
type keyedMAC struct{ pool sync.Pool }

type macState struct {
	hash hash.Hash
	in   []byte
	out  [sha256.Size]byte
}

func newMAC(secret []byte) *keyedMAC {
	// The pool makes hashes later, when the caller may have changed its slice.
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

	// A copy, because the next caller writes to the state.
	out := s.out
	if cap(s.in) <= 1024 { // the pool must not keep a large buffer
		m.pool.Put(s)
	}

	return out
}

// sign returns id with its signature for a site.
func (m *keyedMAC) sign(site presence.Site, id string) string {
	// No id has the character that begins the name of a site.
	sum := m.sum(domainID, site.Qualify(id))

	var buf [signedLen]byte
	b := append(buf[:0], id...)

	b = append(b, '.')
	return string(base64.RawURLEncoding.AppendEncode(b, sum[:idBytes]))
}
