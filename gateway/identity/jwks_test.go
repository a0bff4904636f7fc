package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/golang-jwt/jwt/v5"

	"headcount/presence"
)

// Keys of the tests, made once: making an RSA key takes long.
var (
	rsaKey = sync.OnceValue(func() *rsa.PrivateKey { return orPanic(rsa.GenerateKey(rand.Reader, 2048)) })
	ecKey  = sync.OnceValue(func() *ecdsa.PrivateKey {
		return orPanic(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	})
	ec384Key = sync.OnceValue(func() *ecdsa.PrivateKey {
		return orPanic(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	})
	edKey = sync.OnceValue(newEdKey)
)

func newEdKey() ed25519.PrivateKey {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return orPanic(key, err)
}

func orPanic[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// keyServer serves a JWK set that tests can change, without a network.
type keyServer struct {
	hits   atomic.Int32
	mu     sync.Mutex
	answer http.HandlerFunc
}

const keysURL = "http://keys.test"

// newIDs returns identities that get their keys from this server.
func (s *keyServer) newIDs(t testing.TB, cfg Config) *Identities {
	t.Helper()
	cfg.JWKSURL = keysURL + cfg.JWKSURL
	ids := newTestIDs(t, cfg)
	ids.keys.client.Transport = s

	return ids
}

// RoundTrip implements http.RoundTripper.
func (s *keyServer) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	s.hits.Add(1)
	s.mu.Lock()
	answer := s.answer
	s.mu.Unlock()

	defer func() {
		// net/http would break off such an answer, which a recorder cannot.
		if recover() == http.ErrAbortHandler {
			err = io.ErrUnexpectedEOF
		}
	}()

	w := httptest.NewRecorder()
	answer(w, r)

	return w.Result(), r.Context().Err()
}

func (s *keyServer) serve(answer http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.answer = answer
}

func (s *keyServer) serveKeys(keys ...jose.JSONWebKey) {
	body := orPanic(json.Marshal(jose.JSONWebKeySet{Keys: append([]jose.JSONWebKey{}, keys...)}))
	s.serve(func(w http.ResponseWriter, _ *http.Request) { w.Write(body) })
}

func (s *keyServer) serveError(status int) {
	s.serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) })
}

func testJWK(id string, key any) jose.JSONWebKey { return jose.JSONWebKey{KeyID: id, Key: key} }

func signWith(method jwt.SigningMethod, kid string, key any) string {
	tok := jwt.NewWithClaims(method, jwt.MapClaims{"sub": "ada"})
	if kid != "" {
		tok.Header["kid"] = kid
	}

	return orPanic(tok.SignedString(key))
}

// keyClock is a clock that tests set.
type keyClock struct{ now atomic.Int64 }

func (c *keyClock) Now() time.Time          { return time.Unix(1_900_000_000, c.now.Load()) }
func (c *keyClock) advance(d time.Duration) { c.now.Add(int64(d)) }

func judgeToken(ids *Identities, token string) error {
	_, err := ids.Identify(getRequest("/", "Authorization", "Bearer "+token), presence.DefaultSite, false)
	return err
}

// TestKeysGoWithTheirAlgorithm: a key is used only with its own algorithm.
func TestKeysGoWithTheirAlgorithm(t *testing.T) {
	s := &keyServer{}
	s.serveKeys(testJWK("r", rsaKey().Public()), testJWK("e", ecKey().Public()), testJWK("d", edKey().Public()),
		testJWK("e384", ec384Key().Public()))
	only := s.newIDs(t, Config{})
	both := s.newIDs(t, Config{JWTSecret: []byte("s3cret")})

	publicPEM := pem.EncodeToMemory(&pem.Block{
		Type: "PUBLIC KEY", Bytes: orPanic(x509.MarshalPKIXPublicKey(rsaKey().Public())),
	})
	for name, tc := range map[string]struct {
		token      string
		only, both error
	}{
		"RS256":            {signWith(jwt.SigningMethodRS256, "r", rsaKey()), nil, nil},
		"ES256":            {signWith(jwt.SigningMethodES256, "e", ecKey()), nil, nil},
		"EdDSA":            {signWith(jwt.SigningMethodEdDSA, "d", edKey()), nil, nil},
		"no kid":           {signWith(jwt.SigningMethodEdDSA, "", edKey()), nil, nil},
		"HS256":            {signWith(jwt.SigningMethodHS256, "", []byte("s3cret")), ErrBadToken, nil},
		"HS256 with a kid": {signWith(jwt.SigningMethodHS256, "r", []byte("s3cret")), ErrBadToken, nil},
		// The public key must not be usable as if it were a secret.
		"HS256 by the public key": {signWith(jwt.SigningMethodHS256, "r", publicPEM), ErrBadToken, ErrBadToken},
		"RS512":                   {signWith(jwt.SigningMethodRS512, "r", rsaKey()), ErrBadToken, ErrBadToken},
		"PS256":                   {signWith(jwt.SigningMethodPS256, "r", rsaKey()), ErrBadToken, ErrBadToken},
		"ES384":                   {signWith(jwt.SigningMethodES384, "e384", ec384Key()), ErrBadToken, ErrBadToken},
		"kid of another kind":     {signWith(jwt.SigningMethodEdDSA, "r", edKey()), ErrBadToken, ErrBadToken},
		"kid unknown":             {signWith(jwt.SigningMethodEdDSA, "x", edKey()), ErrBadToken, ErrBadToken},
		"another key":             {signWith(jwt.SigningMethodEdDSA, "d", newEdKey()), ErrBadToken, ErrBadToken},
		"another key and no kid":  {signWith(jwt.SigningMethodEdDSA, "", newEdKey()), ErrBadToken, ErrBadToken},
		"none": {
			signWith(jwt.SigningMethodNone, "r", jwt.UnsafeAllowNoneSignatureType), ErrBadToken, ErrBadToken,
		},
		"HS256 with no secret left": {signWith(jwt.SigningMethodHS256, "", []byte{}), ErrBadToken, ErrBadToken},
	} {
		t.Run(name, func(t *testing.T) {
			if err := judgeToken(only, tc.token); !errors.Is(err, tc.only) {
				t.Errorf("with JWKS alone the token gets %v, want %v", err, tc.only)
			}

			if err := judgeToken(both, tc.token); !errors.Is(err, tc.both) {
				t.Errorf("with JWKS and a secret the token gets %v, want %v", err, tc.both)
			}
		})
	}
}

func TestKeysRotate(t *testing.T) {
	var clock keyClock
	s := &keyServer{}
	a, b := newEdKey(), newEdKey()
	c := newEdKey()
	s.serveKeys(testJWK("a", a.Public()))
	ids := s.newIDs(t, Config{Now: clock.Now})
	if s.hits.Load() != 0 {
		t.Fatal("keys were fetched before the first token")
	}

	for range 3 {
		if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "a", a)); err != nil {
			t.Fatal(err)
		}
	}

	if n := s.hits.Load(); n != 1 {
		t.Fatalf("%d fetches for one set", n)
	}

	// A new key is fetched as soon as a token names it.
	s.serveKeys(testJWK("a", a.Public()), testJWK("b", b.Public()))
	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "b", b)); err != nil {
		t.Fatal(err)
	}

	// A new key is also fetched for a token without a key id whose signature fits none of the known keys.
	s.serveKeys(testJWK("", c.Public()))
	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "", c)); err != nil {
		t.Fatal(err)
	}
	if n := s.hits.Load(); n != 3 {
		t.Fatalf("%d fetches for three sets", n)
	}

	// A key that was removed from the set is no longer accepted.
	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "a", a)); !errors.Is(err, ErrBadToken) {
		t.Fatalf("a token of a removed key gets %v, want ErrBadToken", err)
	}
}

func TestRevokedKeysEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var clock keyClock
		s := &keyServer{}
		a := newEdKey()
		s.serveKeys(testJWK("a", a.Public()))
		ids := s.newIDs(t, Config{Now: clock.Now})

		token := signWith(jwt.SigningMethodEdDSA, "a", a)
		if err := judgeToken(ids, token); err != nil {
			t.Fatal(err)
		}

		s.serveKeys() // the key is revoked
		clock.advance(keysFresh + time.Second)
		_ = judgeToken(ids, token) // the old set is used until the new one has been fetched
		synctest.Wait()
		if judgeToken(ids, token) == nil {
			t.Error("a token of a revoked key is still accepted")
		}
	})
}

func TestUnknownKeysAreAskedForSeldom(t *testing.T) {
	var clock keyClock
	s := &keyServer{}
	a := newEdKey()
	s.serveKeys(testJWK("a", a.Public()))
	ids := s.newIDs(t, Config{Now: clock.Now})

	// Forged tokens must not make this process flood the key server, nor delay the tokens of others. Those that cause
	// no fetch are not refused: a key may have come since the last one, and its tokens look the same.
	var refused, away int
	for _, kid := range []string{"x", ""} { // invented, or missing
		forged := signWith(jwt.SigningMethodEdDSA, kid, newEdKey())
		for range 50 {
			err := judgeToken(ids, forged)
			switch {
			case errors.Is(err, ErrBadToken):
				refused++
			case errors.Is(err, ErrKeysAway):
				away++
			default:
				t.Fatal(err)
			}
		}
	}

	// The first fetch brought the first keys, so the first token needed two.
	if refused != keysBurst-1 || away != 100-refused {
		t.Fatalf("%d forged tokens were refused, and %d may be good, want %d and the rest", refused, away, keysBurst-1)
	}
	if n := s.hits.Load(); n != keysBurst {
		t.Fatalf("%d simultaneous fetches, want %d", n, keysBurst)
	}

	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "a", a)); err != nil {
		t.Fatalf("meanwhile a token of a known key gets %v", err)
	}

	// Among the forged ones is one of a key that the issuer has just begun to use.
	b := newEdKey()
	s.serveKeys(testJWK("a", a.Public()), testJWK("b", b.Public()))
	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "b", b)); !errors.Is(err, ErrKeysAway) {
		t.Fatalf("a token of a new key gets %v, want ErrKeysAway", err)
	}

	clock.advance(KeysEvery)
	if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "b", b)); err != nil {
		t.Fatalf("when it is tried again the token of a new key gets %v", err)
	}
	if n := s.hits.Load(); n != keysBurst+1 {
		t.Fatalf("after a while there were %d fetches, want %d", n, keysBurst+1)
	}
}

func TestOldKeysServeWhileTheURLIsAway(t *testing.T) {
	var clock keyClock
	s := &keyServer{}
	a, b := newEdKey(), newEdKey()
	var told atomic.Pointer[error]
	ids := s.newIDs(t, Config{
		JWKSURL: "/?secret=hush", Now: clock.Now, KeysError: func(err error) { told.Store(&err) },
	})
	token := signWith(jwt.SigningMethodEdDSA, "a", a)

	s.serveError(http.StatusBadGateway)
	if err := judgeToken(ids, token); !errors.Is(err, ErrKeysAway) || errors.Is(err, ErrBadToken) {
		t.Fatalf("without any keys a token gets %v", err)
	}
	if err := told.Load(); err == nil || !strings.Contains((*err).Error(), "502") {
		t.Fatalf("KeysError received %v, want the status 502", err)
	}

	// No key would make this text a token, so the answer need not wait for keys.
	if err := judgeToken(ids, "no token"); !errors.Is(err, ErrBadToken) {
		t.Fatalf("a text that is no token gets %v, want ErrBadToken", err)
	}

	s.serveKeys(testJWK("a", a.Public()))
	if err := judgeToken(ids, token); err != nil {
		t.Fatalf("when the key server is back a token gets %v", err)
	}

	for name, away := range map[string]http.HandlerFunc{
		"500":       func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
		"204":       func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) },
		"no JSON":   func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("<html>")) },
		"no keys":   func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{"error":"x"}`)) },
		"keys null": func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{"keys":null}`)) },
		"too long": func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte(`{"keys":[]}` + strings.Repeat(" ", maxKeysSize)))
		},
		"cut off": func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			s.serve(away)
			told.Store(nil)
			clock.advance(keysFresh + KeysEvery)
			for range 2 { // the second token causes no fetch
				if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "b", b)); !errors.Is(err, ErrKeysAway) {
					t.Fatalf("a token of an unknown key, which may be new, gets %v, want ErrKeysAway", err)
				}
			}

			if err := told.Load(); err == nil || strings.Contains((*err).Error(), "hush") {
				t.Fatalf("KeysError received %v, want an error without the secret", err)
			}

			if err := judgeToken(ids, token); err != nil {
				t.Fatalf("a token of a known key gets %v", err)
			}
		})
	}
}

// TestSlowKeysHoldNobodyUp: while the key server does not answer, calls give up, and one fetch is under way for all of
// them.
func TestSlowKeysHoldNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &keyServer{}
		came, gone := make(chan struct{}), make(chan struct{})
		s.serve(func(_ http.ResponseWriter, r *http.Request) {
			close(came)
			<-r.Context().Done()
			close(gone)
		})

		ids := s.newIDs(t, Config{})
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		r := getRequest("/", "Authorization",
			"Bearer "+signWith(jwt.SigningMethodEdDSA, "a", newEdKey())).WithContext(ctx)

		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if _, err := ids.Identify(r, presence.DefaultSite, false); !errors.Is(err, ErrKeysAway) {
					t.Errorf("Identify = %v, want ErrKeysAway", err)
				}
			})
		}

		wg.Wait()
		<-came      // on a busy machine the fetch may come after all calls have given up
		ids.Close() // ends the fetch, and waits for it
		<-gone

		if n := s.hits.Load(); n != 1 {
			t.Fatalf("%d fetches were made at once, want 1", n)
		}

		if err := judgeToken(ids, signWith(jwt.SigningMethodEdDSA, "a", newEdKey())); !errors.Is(err, ErrKeysAway) ||
			s.hits.Load() != 1 {
			t.Fatalf("after Close a token gets %v", err)
		}
		ids.Close()
	})
}

func TestParseKeysTakesWhatIsUsable(t *testing.T) {
	pub := func(id string, key any) string { return string(orPanic(json.Marshal(testJWK(id, key)))) }
	full := func(k jose.JSONWebKey) string { return string(orPanic(json.Marshal(k))) }
	for name, tc := range map[string]struct {
		key string
		alg string // empty: the key is ignored
	}{
		"RSA":            {pub("1", rsaKey().Public()), "RS256"},
		"P-256":          {pub("1", ecKey().Public()), "ES256"},
		"Ed25519":        {pub("1", edKey().Public()), "EdDSA"},
		"for signatures": {full(jose.JSONWebKey{Key: rsaKey().Public(), Use: "sig", Algorithm: "RS256"}), "RS256"},
		"new name":       {full(jose.JSONWebKey{Key: edKey().Public(), Algorithm: "Ed25519"}), "EdDSA"},
		"for encryption": {full(jose.JSONWebKey{Key: rsaKey().Public(), Use: "enc"}), ""},
		"for RS512":      {full(jose.JSONWebKey{Key: rsaKey().Public(), Algorithm: "RS512"}), ""},
		"for PS256":      {full(jose.JSONWebKey{Key: rsaKey().Public(), Algorithm: "PS256"}), ""},
		"P-384":          {pub("1", ec384Key().Public()), ""},
		"weak RSA":       {pub("1", orPanic(rsa.GenerateKey(rand.Reader, 1024)).Public()), ""},
		// A public set contains private keys or secrets only by mistake.
		"private":       {pub("1", edKey()), ""},
		"shared secret": {pub("1", []byte("0123456789abcdef")), ""},
		"unknown kind":  {`{"kty":"new","kid":"1"}`, ""},
		"unknown curve": {`{"kty":"OKP","crv":"X25519","x":"AAAA"}`, ""},
		"point off curve": {
			`{"kty":"EC","crv":"P-256","x":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE",` +
				`"y":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE"}`, "",
		},
		"short Ed25519":    {`{"kty":"OKP","crv":"Ed25519","x":"AAAA"}`, ""},
		"not an object":    {`7`, ""},
		"null":             {`null`, ""},
		"members missing":  {`{"kty":"RSA"}`, ""},
		"kid not a string": {`{"kty":"RSA","kid":7}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			// The other keys of the set are used, whatever stands between them.
			body := `{"keys":[` + pub("before", edKey().Public()) + "," + tc.key + "," +
				pub("after", edKey().Public()) + `]}`
			keys, err := parseKeys([]byte(body))
			if err != nil {
				t.Fatal(err)
			}

			var got string
			if len(keys) == 3 {
				got = keys[1].alg
			} else if len(keys) != 2 {
				t.Fatalf("%d keys of %s", len(keys), body)
			}

			if got != tc.alg || keys[0].id != "before" || keys[len(keys)-1].id != "after" {
				t.Fatalf("serves %q, want %q", got, tc.alg)
			}
		})
	}

	many := strings.Repeat(pub("x", edKey().Public())+",", maxKeys) + pub("x", edKey().Public())
	if keys, err := parseKeys([]byte(`{"keys":[` + many + `]}`)); err != nil || len(keys) != maxKeys {
		t.Fatalf("of one key more than %[3]d the set has %[1]d, %[2]v", len(keys), err, maxKeys)
	}
}

func FuzzParseKeys(f *testing.F) {
	f.Add(orPanic(json.Marshal(jose.JSONWebKeySet{
		Keys: []jose.JSONWebKey{testJWK("e", ecKey().Public()), testJWK("d", edKey().Public())},
	})))
	f.Add([]byte(`{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB"},null,{}]}`))
	f.Add([]byte(`{"keys":{}}`))

	f.Fuzz(func(t *testing.T, body []byte) {
		keys, err := parseKeys(body)
		if err != nil && keys != nil {
			t.Fatal("parseKeys returns both keys and an error")
		}

		for _, k := range keys {
			if k.alg == "" || k.key == nil {
				t.Fatalf("parseKeys returns the unusable key %+v", k)
			}
		}
	})
}
