package identity

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"pgregory.net/rapid"

	"headcount/presence"
)

func idSecrets(s ...string) [][]byte {
	var out [][]byte
	for _, v := range s {
		out = append(out, []byte(v))
	}
	return out
}

func newTestIDs(t testing.TB, cfg Config) *Identities {
	t.Helper()
	if cfg.HashKey == nil {
		cfg.HashKey = []byte("the key of user hashes")
	}

	if cfg.IDSecrets == nil {
		cfg.IDSecrets = idSecrets("an id secret")
	}

	ids := New(cfg)
	t.Cleanup(ids.Close)
	return ids
}

func mustIdentify(t testing.TB, ids *Identities, r *http.Request, query bool) Identity {
	t.Helper()
	id, err := ids.Identify(r, presence.DefaultSite, query)
	if err != nil {
		t.Fatalf("Identify: %v", err)
	}
	return id
}

// getRequest returns a GET with headers given as name, value pairs.
func getRequest(target string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	u, err := url.Parse(target)
	if err != nil {
		panic(err)
	}

	r.URL = u
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	return r
}

func TestAnonymousIDComesBack(t *testing.T) {
	ids := newTestIDs(t, Config{})

	first := mustIdentify(t, ids, getRequest("/-/ws"), true)
	if !first.Fresh || len(first.User) != idLen || len(first.Signed) != signedLen || !first.Expires.IsZero() {
		t.Fatalf("fresh identity %+v", first)
	}
	if !strings.HasPrefix(first.Signed, first.User+".") || url.QueryEscape(first.Signed) != first.Signed {
		t.Fatalf("signed id %q of %q", first.Signed, first.User)
	}
	if first.Hash != ids.Hash(first.User) {
		t.Fatal("the hash of the identity is not that of its user")
	}

	second := mustIdentify(t, ids, getRequest("/-/ws"), true)
	if second.User == first.User {
		t.Fatal("two visitors got the same id")
	}

	a, b := first.Signed, second.Signed
	bad := a[:idLen+1] + b[idLen+1:] // the name of the first with the signature of the second
	for name, tc := range map[string]struct {
		r     *http.Request
		query bool
		want  string // the user; empty: a new one
	}{
		"cookie":                  {getRequest("/", "Cookie", "headcount_id="+a), false, first.User},
		"cookie among others":     {getRequest("/", "Cookie", "x=1; headcount_id="+a+"; y=2"), false, first.User},
		"quoted cookie":           {getRequest("/", "Cookie", `headcount_id="`+a+`"`), false, first.User},
		"cookie on a second line": {getRequest("/", "Cookie", "x=1", "Cookie", "headcount_id="+a), false, first.User},
		"first valid cookie": {
			getRequest("/", "Cookie", "headcount_id="+bad+"; headcount_id="+a+"; headcount_id="+b), false, first.User,
		},
		"another cookie's end":     {getRequest("/", "Cookie", "xheadcount_id="+a), false, ""},
		"header":                   {getRequest("/", Header, a), false, first.User},
		"query":                    {getRequest("/?id="+a, "X", ""), true, first.User},
		"query escaped":            {getRequest("/?x=1&%69d=" + strings.ReplaceAll(a, ".", "%2E")), true, first.User},
		"query where it may not":   {getRequest("/?id=" + a), false, ""},
		"query before cookie":      {getRequest("/?id="+a, "Cookie", "headcount_id="+b), true, first.User},
		"header before cookie":     {getRequest("/", Header, a, "Cookie", "headcount_id="+b), true, first.User},
		"bad query, valid cookie":  {getRequest("/?id="+bad, "Cookie", "headcount_id="+a), true, first.User},
		"bad header, valid cookie": {getRequest("/", Header, bad, "Cookie", "headcount_id="+a), true, first.User},
		"bad query, valid header":  {getRequest("/?id="+bad, Header, a), true, first.User},
		"empty":                    {getRequest("/?id=", Header, "", "Cookie", "headcount_id="), true, ""},
		"bad signature":            {getRequest("/?id=" + bad), true, ""},
		"no signature":             {getRequest("/?id=" + first.User), true, ""},
		"too long":                 {getRequest("/?id=" + a + "A"), true, ""},
		"another case":             {getRequest("/?id=" + swapCase(a)), true, ""},
		"token without settings": {
			getRequest("/?token=x", "Authorization", "Bearer x", "Cookie", "headcount_id="+a), true, first.User,
		},
		"semicolon in the query":    {getRequest("/?x;id=" + a + "&id=" + a), true, first.User},
		"bad escape before a valid": {getRequest("/?x=%zz&id=" + a), true, first.User},
	} {
		t.Run(name, func(t *testing.T) {
			if err := ids.CheckToken(tc.r); err != nil {
				t.Fatalf("CheckToken = %v without JWT settings", err)
			}

			got := mustIdentify(t, ids, tc.r, tc.query)
			isNew := tc.want == ""
			if got.Fresh != isNew || !isNew && got.User != tc.want {
				t.Fatalf("got %+v, want user %q", got, tc.want)
			}
			if got.Hash != ids.Hash(got.User) || !strings.HasPrefix(got.Signed, got.User+".") {
				t.Fatalf("inconsistent identity %+v", got)
			}
		})
	}
}

func swapCase(s string) string {
	return strings.Map(func(r rune) rune {
		if 'a' <= r && r <= 'z' {
			return r - 'a' + 'A'
		}
		if 'A' <= r && r <= 'Z' {
			return r - 'A' + 'a'
		}

		return r
	}, s)
}

// Trying an id costs a hash, and a request may carry thousands, so only some are tried.
func TestOnlySoManyIDsAreTried(t *testing.T) {
	ids := newTestIDs(t, Config{})
	valid := ids.issue(presence.DefaultSite).Signed
	forged := "headcount_id=" + strings.Repeat("A", idLen) + "." + strings.Repeat("A", idLen) + ";"

	last := getRequest("/", "Cookie", strings.Repeat(forged, maxIDs-1)+"headcount_id="+valid)
	if id := mustIdentify(t, ids, last, false); id.Fresh {
		t.Fatal("the last id within the bound was not tried")
	}

	beyond := getRequest("/", "Cookie", strings.Repeat(forged, maxIDs)+"headcount_id="+valid)
	if id := mustIdentify(t, ids, beyond, false); !id.Fresh {
		t.Fatal("an id beyond the bound was tried")
	}
}

// TestAPageMayWantNothingStored: with storage=none the cookie is not read, and the id of the URL is.
func TestAPageMayWantNothingStored(t *testing.T) {
	ids := newTestIDs(t, Config{})
	valid := ids.issue(presence.DefaultSite)
	cookie := "headcount_id=" + valid.Signed

	if id := mustIdentify(t, ids, getRequest("/?storage=none", "Cookie", cookie), true); !id.Fresh {
		t.Error("the cookie was read in spite of storage=none")
	}
	if id := mustIdentify(t, ids, getRequest("/?storage=none&id="+valid.Signed), true); id.User != valid.User {
		t.Error("the id of the URL was not accepted")
	}
	if id := mustIdentify(t, ids, getRequest("/?storage=all", "Cookie", cookie), true); id.User != valid.User {
		t.Error("the cookie was not read")
	}
}

// TestSecretsRotate: with both secrets an id of the old one is accepted and signed again; hashes never change.
func TestSecretsRotate(t *testing.T) {
	before := newTestIDs(t, Config{IDSecrets: idSecrets("old")})
	during := newTestIDs(t, Config{IDSecrets: idSecrets("new", "old")})
	after := newTestIDs(t, Config{IDSecrets: idSecrets("new")})

	first := mustIdentify(t, before, getRequest("/"), false)
	kept := mustIdentify(t, during, getRequest("/", Header, first.Signed), false)
	if kept.Fresh || kept.User != first.User || kept.Hash != first.Hash {
		t.Fatalf("the rotation changed the user %+v to %+v", first, kept)
	}

	// The browser's cookie must stay valid when the old secret is gone.
	if kept.Signed == first.Signed {
		t.Fatal("the id was not signed again with the new secret")
	}

	last := mustIdentify(t, after, getRequest("/", Header, kept.Signed), false)
	if last.Fresh || last.User != first.User {
		t.Fatalf("the end of the rotation changed the user %+v to %+v", kept, last)
	}

	if gone := mustIdentify(t, after, getRequest("/", Header, first.Signed), false); !gone.Fresh {
		t.Fatal("a signature of the removed secret was accepted")
	}

	// Stores contain the hashes, so a user's hash must not change.
	if during.Hash128("u") != before.Hash128("u") || after.Hash128("u") != before.Hash128("u") ||
		after.Hash("u") != before.Hash("u") {
		t.Fatal("a rotation changed a hash")
	}
}

func TestHashesAreKeyedAndSeparate(t *testing.T) {
	ids := newTestIDs(t, Config{IDSecrets: idSecrets("first", "last"), HashKey: []byte("the key")})

	rapid.Check(t, func(t *rapid.T) {
		user := rapid.String().Draw(t, "user")
		of := func(domain string) []byte {
			h := hmac.New(sha256.New, []byte("the key"))
			h.Write([]byte(domain + user))
			return h.Sum(nil)
		}

		if got, want := uint64(ids.Hash(user)), binary.BigEndian.Uint64(of("headcount user 64 v1\x00")); got != want {
			t.Fatalf("Hash(%q) = %x, want %x", user, got, want)
		}
		if got, want := ids.Hash128(user), [16]byte(of("headcount user 128 v1\x00")); got != want {
			t.Fatalf("Hash128(%q) = %x, want %x", user, got, want)
		}
	})
}

func TestSetCookie(t *testing.T) {
	ids := newTestIDs(t, Config{})
	a, b := ids.issue(presence.DefaultSite), ids.issue(presence.DefaultSite)

	known := a
	known.Fresh = false
	linked := known
	linked.Linked = true

	seed := seedPrefix + strings.Repeat("s", idLen)
	derived := a
	derived.Derived = true
	seeded := derived
	seeded.Linked = true

	for name, tc := range map[string]struct {
		r      *http.Request
		id     Identity
		secure bool
		want   string
	}{
		"fresh": {
			getRequest("/"), a, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"fresh, TLS": {
			getRequest("/"), a, true,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; Secure; SameSite=Lax",
		},
		"back": {
			getRequest("/", "Cookie", "headcount_id="+a.Signed), known, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"header, no cookie": {
			getRequest("/", "Headcount-Id", a.Signed), known, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"header, another's": {
			getRequest("/", "Headcount-Id", a.Signed, "Cookie", "headcount_id="+b.Signed), known, false, "",
		},
		// A link with a person's id must not make its reader that person for a year.
		"URL, no cookie":  {getRequest("/?id=" + a.Signed), linked, false, ""},
		"URL, another's":  {getRequest("/?id="+a.Signed, "Cookie", "headcount_id="+b.Signed), linked, false, ""},
		"URL, bad cookie": {getRequest("/?id="+a.Signed, "Cookie", "headcount_id=x"), linked, false, ""},
		"URL, the same": {
			getRequest("/?id="+a.Signed, "Cookie", "headcount_id="+a.Signed), linked, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"token":          {getRequest("/"), Identity{User: "ada"}, true, ""},
		"nothing stored": {getRequest("/?storage=none"), a, false, ""},
		"a seed": {
			getRequest("/", "Cookie", "headcount_new="+seed), derived, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"a seed in the URL": {getRequest("/?id=" + seed), seeded, false, ""},
		"framed": {
			getRequest("/?storage=partitioned"), a, true,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; Secure; SameSite=None; Partitioned",
		},
		"framed, no TLS": {
			getRequest("/?storage=partitioned"), a, false,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; SameSite=Lax",
		},
		"framed, a link": {getRequest("/?storage=partitioned&id=" + a.Signed), linked, true, ""},
		// Unlike a link, a script that the operator permits carries the id on purpose.
		"framed, a script": {
			getRequest("/?storage=partitioned&id="+a.Signed, "Origin", "https://example.com"), linked, true,
			"headcount_id=" + a.Signed + "; Path=/; Max-Age=31536000; HttpOnly; Secure; SameSite=None; Partitioned",
		},
		"framed, elsewhere": {
			getRequest("/?storage=partitioned&id="+a.Signed, "Origin", "https://shop.example"), linked, true, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			ids.SetCookie(w, tc.r, tc.id, tc.secure)
			if got := w.Header().Get("Set-Cookie"); got != tc.want {
				t.Fatalf("Set-Cookie: %s\nwant        %s", got, tc.want)
			}
		})
	}
}

// A browser deletes the cookie of a frame only if the deletion has the attributes with which the cookie was set.
func TestForgetFramedCookie(t *testing.T) {
	ids := newTestIDs(t, Config{})
	r := getRequest("/?storage=partitioned", "Cookie", "headcount_id="+ids.issue(presence.DefaultSite).Signed)

	w := httptest.NewRecorder()
	ids.ForgetCookie(w, r, presence.DefaultSite, true)
	const want = "headcount_id=; Path=/; Max-Age=0; HttpOnly; Secure; SameSite=None; Partitioned"
	if got := w.Header().Get("Set-Cookie"); got != want {
		t.Fatalf("Set-Cookie: %s\nwant        %s", got, want)
	}
}

// All calls of a browser without a valid id are those of one user, whatever carries its seed, or the id that became
// invalid.
func TestCallsAtOnceAreOneUser(t *testing.T) {
	ids := newTestIDs(t, Config{})
	seed := seedPrefix + strings.Repeat("s", idLen)
	other := seedPrefix + strings.Repeat("o", idLen)
	void := strings.Repeat("A", idLen) + "." + strings.Repeat("A", idLen)
	valid := ids.issue(presence.DefaultSite).Signed

	// A browser's first calls are simultaneous, and none of them has the answer to another yet.
	for name, presented := range map[string]string{"a seed": seed, "an id of a lost secret": void} {
		t.Run(name, func(t *testing.T) {
			first := mustIdentify(t, ids, getRequest("/", Header, presented), false)
			if !first.Fresh || !first.Derived || first.Void != (presented == void) {
				t.Fatalf("the first identity is %+v", first)
			}

			for how, r := range map[string]*http.Request{
				"the header":      getRequest("/", Header, presented),
				"the URL":         getRequest("/?id=" + presented),
				"its cookie":      getRequest("/", "Cookie", SeedCookie+"="+presented),
				"the first tab's": getRequest("/", "Cookie", SeedCookie+"_z="+presented+"; "+SeedCookie+"_a="+other),
				"the old cookie":  getRequest("/", "Cookie", Cookie+"="+presented+"; "+SeedCookie+"="+other),
			} {
				if got := mustIdentify(t, ids, r, true); got.User != first.User {
					t.Errorf("by %s the browser is another user", how)
				}
			}

			known := mustIdentify(t, ids, getRequest("/", Header, first.Signed), false)
			if known.Fresh || known.User != first.User {
				t.Errorf("the issued id belongs to another user: %+v", known)
			}

			both := getRequest("/", Header, presented, "Cookie", Cookie+"="+valid)
			if got := mustIdentify(t, ids, both, false); got.Signed != valid {
				t.Error("the seed is preferred to a valid id")
			}
		})
	}

	one := mustIdentify(t, ids, getRequest("/", Header, seed), false)
	if mustIdentify(t, ids, getRequest("/", Header, other), false).User == one.User {
		t.Error("two seeds give the same user")
	}

	shop, err := presence.ParseSite("shop")
	if err != nil {
		t.Fatal(err)
	}
	elsewhere, err := ids.Identify(getRequest("/", Header, seed), shop, false)
	if err != nil || elsewhere.User == one.User {
		t.Errorf("on another site the seed gives the same user, or the error %v", err)
	}

	shopOwn := newTestIDs(t, Config{Sites: []presence.Site{presence.DefaultSite, shop}})
	ofAnother := shopOwn.issue(presence.DefaultSite).Signed
	if got, err := shopOwn.Identify(getRequest("/", Header, ofAnother), shop, false); err != nil || got.Derived {
		t.Errorf("the id of one site gives a user on another: %+v, %v", got, err)
	}

	if got := mustIdentify(t, ids, getRequest("/?storage=none", "Cookie", SeedCookie+"="+seed), false); got.Derived {
		t.Error("a page with storage=none was identified by a cookie")
	}
}

// Servers on the same host have different cookies. A visitor with the default cookie, from before the server had its
// own, stays the same user and gets the new cookie. The cookie of another server is ignored, and kept.
func TestCookieOfANameOfItsOwn(t *testing.T) {
	ids := newTestIDs(t, Config{Cookie: "mine"})
	other := newTestIDs(t, Config{IDSecrets: [][]byte{[]byte("another secret")}})
	shop := presence.SiteOf("shop")

	for site, names := range map[presence.Site][2]string{
		presence.DefaultSite: {"mine", "headcount_id"}, shop: {"mine_shop", "headcount_id_shop"},
	} {
		own, before := names[0], names[1]
		a, b := ids.issue(site).Signed, ids.issue(site).Signed
		foreign := other.issue(site).Signed

		for cookies, want := range map[string]struct{ id, forgets string }{
			own + "=" + a:                                 {a, own},
			before + "=" + a:                              {a, before},
			own + "=" + a + "; " + before + "=" + b:       {a, own + " " + before},
			own + "=" + a + "; " + before + "=" + foreign: {a, own},
			before + "=" + foreign:                        {"", ""},
		} {
			r := getRequest("/", "Cookie", cookies)
			id := mustIdentifyOn(t, ids, r, site)
			if id.Fresh != (want.id == "") || !id.Fresh && id.Signed != want.id {
				t.Errorf("%s: %+v", cookies, id)
			}

			w := httptest.NewRecorder()
			ids.SetCookie(w, r, id, false)
			if set := w.Result().Cookies(); len(set) != 1 || set[0].Name != own || set[0].Value != id.Signed {
				t.Errorf("%s: the cookies %v are set", cookies, set)
			}

			w = httptest.NewRecorder()
			ids.ForgetCookie(w, r, site, false)
			var forgotten []string
			for _, c := range w.Result().Cookies() {
				forgotten = append(forgotten, c.Name)
			}
			if got := strings.Join(forgotten, " "); got != want.forgets {
				t.Errorf("%s: %q are forgotten, want %q", cookies, got, want.forgets)
			}
		}
	}
}

// signToken signs claims with secret, by HS256.
func signToken(t testing.TB, secret string, claims jwt.MapClaims) string {
	t.Helper()
	s, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// signRaw signs any payload, even one that has no claims.
func signRaw(secret, header, payload string) string {
	enc := base64.RawURLEncoding
	text := enc.EncodeToString([]byte(header)) + "." + enc.EncodeToString([]byte(payload))
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte(text))

	return text + "." + enc.EncodeToString(h.Sum(nil))
}

func TestTokens(t *testing.T) {
	// The time has a fraction, since exp may have one.
	now := time.Unix(1_900_000_000, 500_000_000)
	ids := newTestIDs(t, Config{JWTSecret: []byte("s3cret"), Leeway: time.Minute, Now: func() time.Time { return now }})
	if !ids.tokensRequired() {
		t.Fatal("with a JWT secret tokens are not required")
	}

	const hs = `{"alg":"HS256","typ":"JWT"}`
	good := signToken(t, "s3cret", jwt.MapClaims{"sub": "ada"})
	none := jwt.NewWithClaims(jwt.SigningMethodNone, jwt.MapClaims{"sub": "ada"})
	unsigned, err := none.SignedString(jwt.UnsafeAllowNoneSignatureType)
	if err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		token string
		user  string // empty: the token is refused
		why   string
	}{
		"plain":              {good, "ada", ""},
		"not ended":          {signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "exp": now.Unix() + 1}), "ada", ""},
		"fraction left":      {signRaw("s3cret", hs, `{"sub":"ada","exp":1900000000.75}`), "ada", ""},
		"fraction gone":      {signRaw("s3cret", hs, `{"sub":"ada","exp":1900000000.25}`), "", "expired"},
		"just ended":         {signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "exp": now.Unix()}), "", "expired"},
		"ended at 0":         {signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "exp": 0}), "", "expired"},
		"ends far away":      {signRaw("s3cret", hs, `{"sub":"ada","exp":1e300}`), "ada", ""},
		"ended long ago":     {signRaw("s3cret", hs, `{"sub":"ada","exp":-1e300}`), "", "expired"},
		"exp as text":        {signRaw("s3cret", hs, `{"sub":"ada","exp":"2900000000"}`), "", "exp"},
		"exp null":           {signRaw("s3cret", hs, `{"sub":"ada","exp":null}`), "", "exp"},
		"begun":              {signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "nbf": now.Unix()}), "ada", ""},
		"issuer a bit ahead": {signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "nbf": now.Unix() + 60}), "ada", ""},
		"not begun": {
			signToken(t, "s3cret", jwt.MapClaims{"sub": "ada", "nbf": now.Unix() + 61}), "", "not valid yet",
		},
		"nbf as text":    {signRaw("s3cret", hs, `{"sub":"ada","nbf":"0"}`), "", "nbf"},
		"other claims":   {signRaw("s3cret", hs, `{"sub":"ada","aud":7,"iat":99e99,"iss":[]}`), "ada", ""},
		"SUB is not sub": {signRaw("s3cret", hs, `{"sub":"ada","SUB":"eve","Exp":0}`), "ada", ""},
		"no sub":         {signToken(t, "s3cret", jwt.MapClaims{"name": "ada"}), "", "sub"},
		"empty sub":      {signToken(t, "s3cret", jwt.MapClaims{"sub": ""}), "", "sub"},
		"sub a number":   {signToken(t, "s3cret", jwt.MapClaims{"sub": 7}), "", "sub"},
		"longest sub": {
			signToken(t, "s3cret", jwt.MapClaims{"sub": strings.Repeat("é", 128)}), strings.Repeat("é", 128), "",
		},
		"sub too long":        {signToken(t, "s3cret", jwt.MapClaims{"sub": strings.Repeat("a", 257)}), "", "sub"},
		"sub with a newline":  {signToken(t, "s3cret", jwt.MapClaims{"sub": "a\nb"}), "", "sub"},
		"sub broken":          {signRaw("s3cret", hs, "{\"sub\":\"a\xff\"}"), "", "sub"},
		"half a surrogate":    {signRaw("s3cret", hs, `{"sub":"a\ud800"}`), "", "sub"},
		"another secret":      {signToken(t, "other", jwt.MapClaims{"sub": "ada"}), "", "signature"},
		"no signature":        {good[:strings.LastIndexByte(good, '.')+1], "", "signature"},
		"alg none":            {unsigned, "", "algorithm"},
		"alg None":            {signRaw("s3cret", `{"alg":"None"}`, `{"sub":"ada"}`), "", "algorithm"},
		"alg HS512":           {signAda(t, jwt.SigningMethodHS512, []byte("s3cret")), "", "algorithm"},
		"alg RS256 by secret": {signRaw("s3cret", `{"alg":"RS256"}`, `{"sub":"ada"}`), "", "algorithm"},
		"alg missing":         {signRaw("s3cret", `{"typ":"JWT"}`, `{"sub":"ada"}`), "", "algorithm"},
		"alg a number":        {signRaw("s3cret", `{"alg":1}`, `{"sub":"ada"}`), "", "algorithm"},
		"crit": {
			signRaw("s3cret", `{"alg":"HS256","crit":["b64"],"b64":false}`, `{"sub":"ada"}`), "", "extensions",
		},
		"payload null":    {signRaw("s3cret", hs, `null`), "", "sub"},
		"payload a list":  {signRaw("s3cret", hs, `["sub"]`), "", "malformed"},
		"payload no JSON": {signRaw("s3cret", hs, `{"sub":`), "", "malformed"},
		"header no JSON":  {signRaw("s3cret", `{`, `{"sub":"ada"}`), "", "malformed"},
		"no token at all": {"hello", "", "malformed"},
		"four parts":      {good + ".x", "", "malformed"},
		"padded":          {good + "=", "", "malformed"},
		"empty":           {"", "", "empty"},
		"too long":        {strings.Repeat("a", maxToken+1), "", "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			for where, r := range map[string]*http.Request{
				"header": getRequest("/", "Authorization", "Bearer "+tc.token),
				"query":  getRequest("/?token=" + url.QueryEscape(tc.token)),
			} {
				id, err := ids.Identify(r, presence.DefaultSite, true)

				// A token that another party signed, such as a proxy, does not matter to public calls.
				others := tc.why == "signature" || tc.why == "algorithm"
				if checked := ids.CheckToken(r); where == "header" && (checked == nil) != (err == nil || others) {
					t.Fatalf("%s: CheckToken = %v, Identify = %v", where, checked, err)
				}

				if tc.user == "" {
					if !errors.Is(err, ErrBadToken) || !strings.Contains(err.Error(), tc.why) {
						t.Fatalf("%s: Identify = %+v, %v; want a bad token: %s", where, id, err, tc.why)
					}

					// Errors are logged and sent to clients, and whoever sees a token can use it.
					for part := range strings.SplitSeq(tc.token, ".") {
						if len(part) > 8 && strings.Contains(err.Error(), part) {
							t.Fatalf("%s: the error contains the token: %v", where, err)
						}
					}

					continue
				}

				if err != nil || id.User != tc.user || id.Signed != "" || id.Fresh || id.Hash != ids.Hash(tc.user) {
					t.Fatalf("%s: Identify = %+v, %v; want %q", where, id, err, tc.user)
				}
			}
		})
	}
}

func signAda(t testing.TB, method jwt.SigningMethod, key any) string {
	t.Helper()
	s, err := jwt.NewWithClaims(method, jwt.MapClaims{"sub": "ada"}).SignedString(key)
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// White space around a secret, such as the newline of a file, may belong to the secret or not. Tokens of both are
// accepted.
func TestSecretWithANewline(t *testing.T) {
	for written, signs := range map[string]map[string]bool{
		"s3cret":      {"s3cret": true, "s3cret\n": false},
		" s3cret\r\n": {"s3cret": true, " s3cret\r\n": true, " s3cret": false},
		" \n":         {" \n": true, "": false},
	} {
		ids := newTestIDs(t, Config{JWTSecret: []byte(written)})

		for secret, good := range signs {
			id, err := ids.Identify(getRequest("/?token="+signRaw(secret, `{"alg":"HS256"}`, `{"sub":"ada"}`)),
				presence.DefaultSite, true)
			if (err == nil && id.User == "ada") != good {
				t.Errorf("a token by %q where the secret is %q: %+v, %v", secret, written, id, err)
			}
		}
	}
}

// If issuers and audiences are configured, a token must have one of each, with exactly that spelling.
func TestTokensForOthers(t *testing.T) {
	for _, tc := range []struct {
		issuers, audiences []string
		claims             string
		why                string // empty: accepted
	}{
		{[]string{"a", "b"}, nil, `"iss":"b"`, ""},
		{[]string{"a"}, nil, `"iss":"A"`, "iss"},
		{[]string{"a"}, nil, `"iss":["a"]`, "iss"},
		{[]string{"a"}, nil, `"aud":"a"`, "iss"},
		{nil, []string{"x", "y"}, `"aud":"y","iss":"anybody"`, ""},
		{nil, []string{"x"}, `"aud":["w","x"]`, ""},
		{nil, []string{"x"}, `"aud":"w"`, "aud"},
		{nil, []string{"x"}, `"aud":[]`, "aud"},
		{nil, []string{"x"}, `"aud":["x",7]`, "aud"},
		{nil, []string{"x"}, `"iss":"x"`, "aud"},
		{[]string{"a"}, []string{"x"}, `"iss":"a","aud":"x"`, ""},
		{[]string{"a"}, []string{"x"}, `"iss":"a","aud":"w"`, "aud"},
	} {
		ids := newTestIDs(t, Config{JWTSecret: []byte("s"), Issuers: tc.issuers, Audiences: tc.audiences})
		token := signRaw("s", `{"alg":"HS256"}`, `{"sub":"ada",`+tc.claims+`}`)
		id, err := ids.Identify(getRequest("/", "Authorization", "Bearer "+token), presence.DefaultSite, false)

		good := err == nil && id.User == "ada"
		bad := errors.Is(err, ErrBadToken) && strings.Contains(err.Error(), tc.why)
		if tc.why == "" && !good || tc.why != "" && !bad {
			t.Errorf("%q, %q and %s: %+v, %v", tc.issuers, tc.audiences, tc.claims, id, err)
		}
	}
}

// TestExpiresIsTheTokensEnd: an identity expires with its token, and never if the token has no exp.
func TestExpiresIsTheTokensEnd(t *testing.T) {
	now := time.Unix(1_900_000_000, 0)
	ids := newTestIDs(t, Config{JWTSecret: []byte("s"), Now: func() time.Time { return now }})

	ends := signToken(t, "s", jwt.MapClaims{"sub": "a", "exp": now.Unix() + 60})
	with := mustIdentify(t, ids, getRequest("/", "Authorization", "Bearer "+ends), false)
	if !with.Expires.Equal(now.Add(time.Minute)) {
		t.Fatalf("Expires = %v, want the exp of the token", with.Expires)
	}

	endless := signToken(t, "s", jwt.MapClaims{"sub": "a"})
	without := mustIdentify(t, ids, getRequest("/", "Authorization", "Bearer "+endless), false)
	if !without.Expires.IsZero() {
		t.Fatalf("Expires = %v without exp, want the zero time", without.Expires)
	}
}

func TestWhereTokensAreLookedFor(t *testing.T) {
	ids := newTestIDs(t, Config{JWTSecret: []byte("s")})
	a := signToken(t, "s", jwt.MapClaims{"sub": "a"})
	b := signToken(t, "s", jwt.MapClaims{"sub": "b"})
	anonymous := newTestIDs(t, Config{}).issue(presence.DefaultSite).Signed

	for name, tc := range map[string]struct {
		r     *http.Request
		query bool
		user  string
		err   error
	}{
		"none":                     {getRequest("/"), true, "", ErrNoToken},
		"header":                   {getRequest("/", "Authorization", "Bearer "+a), false, "a", nil},
		"scheme in any case":       {getRequest("/", "Authorization", "bEARER   "+a+" "), false, "a", nil},
		"query":                    {getRequest("/?token=" + a), true, "a", nil},
		"query where it may not":   {getRequest("/?token=" + a), false, "", ErrNoToken},
		"bad query where it isn't": {getRequest("/?token=x"), false, "", ErrNoToken},
		"query before header":      {getRequest("/?token="+b, "Authorization", "Bearer "+a), true, "b", nil},
		"bad header, good query":   {getRequest("/?token="+b, "Authorization", "Bearer x"), true, "b", nil},
		"a proxy's, good query": {
			getRequest("/?token="+b, "Authorization", "Bearer "+signToken(t, "proxy", jwt.MapClaims{"sub": "p"})), true,
			"b", nil,
		},
		"another scheme":           {getRequest("/", "Authorization", "Basic YTpi"), true, "", ErrNoToken},
		"another scheme and query": {getRequest("/?token="+b, "Authorization", "Basic YTpi"), true, "b", nil},
		"second line": {
			getRequest("/", "Authorization", "Basic YTpi", "Authorization", "Bearer "+a), true, "a", nil,
		},
		"bare scheme": {getRequest("/", "Authorization", "Bearer"), true, "", ErrBadToken},
		"empty query": {getRequest("/?token="), true, "", ErrBadToken},
		"an id is no token": {
			getRequest("/?id="+anonymous, Header, anonymous, "Cookie", "headcount_id="+anonymous), true, "", ErrNoToken,
		},
	} {
		t.Run(name, func(t *testing.T) {
			id, err := ids.Identify(tc.r, presence.DefaultSite, tc.query)
			if !errors.Is(err, tc.err) || id.User != tc.user {
				t.Fatalf("Identify = %+v, %v; want %q, %v", id, err, tc.user, tc.err)
			}

			// CheckToken searches where calls without a token in their URL do, and accepts a missing token as well.
			_, want := ids.Identify(tc.r, presence.DefaultSite, false)
			if Nobody(want) {
				want = nil
			}

			if err := ids.CheckToken(tc.r); fmt.Sprint(err) != fmt.Sprint(want) {
				t.Fatalf("CheckToken = %v, want %v", err, want)
			}
		})
	}
}

// A signed id is accepted. Any text that differs from it is not.
func TestSignedIDsCannotBeChanged(t *testing.T) {
	ids := newTestIDs(t, Config{IDSecrets: idSecrets("new", "old")})
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.SampledFrom(ids.macs).Draw(t, "secret")
		user := rapid.StringMatching(`[A-Za-z0-9_-]{22}`).Draw(t, "user")
		signed := m.sign(presence.DefaultSite, user)

		tries := maxIDs
		if id, ok := ids.verify(signed, presence.DefaultSite, &tries); !ok || id.User != user {
			t.Fatalf("verify(%q) = %+v, %v", signed, id, ok)
		}

		changed := []byte(signed)
		changed[rapid.IntRange(0, len(changed)-1).Draw(t, "at")] ^= byte(rapid.IntRange(1, 255).Draw(t, "by"))
		if _, ok := ids.verify(string(changed), presence.DefaultSite, &tries); ok {
			t.Fatalf("%q is accepted, which was made of %q", changed, signed)
		}
	})
}

func FuzzIdentifyAnonymous(f *testing.F) {
	ids := newTestIDs(f, Config{IDSecrets: idSecrets("new", "old")})
	const user = "AAAAAAAAAAAAAAAAAAAAAA" // the same user in every process of the fuzzer
	known := Identity{User: user, Signed: ids.macs[1].sign(presence.DefaultSite, user)}
	f.Add("id="+known.Signed, known.Signed, "headcount_id="+known.Signed)
	f.Add("id=%zz&id=;&%69d=+", ".", `headcount_id="`)
	f.Add("&&==&id", strings.Repeat(".", signedLen), ";;=;headcount_id;headcount_id=\"\"")

	f.Fuzz(func(t *testing.T, query, header, cookie string) {
		r := &http.Request{URL: &url.URL{RawQuery: query}, Header: http.Header{Header: {header}, "Cookie": {cookie}}}
		id, err := ids.Identify(r, presence.DefaultSite, true)
		if err != nil || len(id.Signed) != signedLen || id.User != id.Signed[:idLen] {
			t.Fatalf("Identify = %+v, %v", id, err)
		}

		if !id.Fresh && id.User != known.User {
			t.Fatalf("forged: %+v", id)
		}
	})
}

func FuzzToken(f *testing.F) {
	now := time.Unix(1_900_000_000, 0)
	ids := newTestIDs(f, Config{JWTSecret: []byte("s"), Now: func() time.Time { return now }})
	f.Add(`{"alg":"HS256"}`, `{"sub":"ada","exp":2000000000,"nbf":1e9}`)
	f.Add(`{"alg":"none"}`, `{"sub":"ada"}`)
	f.Add(`{"alg":"HS256","crit":null}`, `{"sub":{},"exp":[]}`)
	f.Add(`{"alg":"HS256"}`, `{"sub":"a\u0000","exp":1e308}`)

	f.Fuzz(func(t *testing.T, header, payload string) {
		raw := signRaw("s", header, payload)
		id, err := ids.fromToken(context.Background(), raw)
		if err != nil {
			if !errors.Is(err, ErrBadToken) {
				t.Fatalf("the error %v is not ErrBadToken", err)
			}
			return
		}

		var claims map[string]any
		if err := json.Unmarshal([]byte(payload), &claims); err != nil || claims["sub"] != id.User || id.User == "" ||
			len(id.User) > maxUser {
			t.Fatalf("%+v from %q", id, payload)
		}

		if !id.Expires.IsZero() && !now.Before(id.Expires) {
			t.Fatalf("an expired token was accepted: %+v", id)
		}

		if _, err := ids.fromToken(context.Background(), raw[:len(raw)-1]); !errors.Is(err, ErrBadToken) {
			t.Fatalf("a token with a shorter signature gets %v", err)
		}
	})
}
