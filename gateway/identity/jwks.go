package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/golang-jwt/jwt/v5"
	"golang.org/x/sync/singleflight"

	"headcount/counter/limit"
	"headcount/internal/setting"
)

// keyMethods are the algorithms for which public keys are accepted.
var keyMethods = []string{
	jwt.SigningMethodRS256.Alg(),
	jwt.SigningMethodES256.Alg(),
	jwt.SigningMethodEdDSA.Alg(),
}

// Bounds and times of the key source.
const (
	keysFresh   = 5 * time.Minute // older keys are fetched again, and used until the new ones have arrived
	keysTimeout = 5 * time.Second // longest duration of one whole fetch
	KeysEvery   = 5 * time.Second // average time between two fetches; anyone can name unknown keys and so cause fetches
	keysBurst   = 4               // fetches that may follow each other at once, so that a rotation is seen at once
	maxKeysSize = 1 << 20         // bytes of the answer; a longer answer is refused, and the old keys stay
	maxKeys     = 32              // usable keys; later keys are ignored
	minRSABits  = 2048            // a weaker RSA key is ignored (RFC 7518, 3.3)
	maxRSABits  = 8192            // a longer RSA key is ignored, since verifying with it takes long
)

// keysRate bounds the fetches.
var keysRate = limit.Rate{Every: KeysEvery, Burst: keysBurst}

// A publicKey verifies the signatures of tokens.
type publicKey struct {
	id  string // may be empty
	alg string // the only algorithm that the key serves
	key any    // *rsa.PublicKey, *ecdsa.PublicKey on P-256 or ed25519.PublicKey
}

// A keySet holds the keys of one fetch. It never changes.
type keySet struct {
	keys    []publicKey
	fetched time.Time
}

// keySource holds the keys of a URL. It fetches the keys when they are first needed,
// when they are old and when a token names an unknown key. While the URL cannot be
// reached, the old keys serve. A keySource is safe for use by many goroutines.
type keySource struct {
	url    string
	client *http.Client
	now    func() time.Time
	began  time.Time
	failed func(error) // may be nil

	set    atomic.Pointer[keySet] // nil until the first success
	ctx    context.Context        // ends with close
	cancel context.CancelFunc

	fetches singleflight.Group // one at a time
	busy    atomic.Bool        // a fetch is under way
	back    time.Duration      // after began: when all fetches that keysRate allows are back; only fetches use it
}

func newKeySource(raw string, now func() time.Time, failed func(error)) *keySource {
	// So that close can close its idle connections.
	transport := http.DefaultTransport.(*http.Transport).Clone()

	k := &keySource{url: raw, client: &http.Client{Transport: transport}, now: now, began: now(), failed: failed}
	k.ctx, k.cancel = context.WithCancel(context.Background())

	return k
}

// close cancels a fetch under way and waits for its end. No fetch begins after it.
func (k *keySource) close() {
	k.cancel()
	// This joins the fetch under way, if there is one.
	<-k.fetches.DoChan("", func() (any, error) { return nil, nil })
	k.client.CloseIdleConnections()
}

// current returns the newest keys, or ErrKeysAway without any. It waits only for the first ones.
func (k *keySource) current(ctx context.Context) (*keySet, error) {
	set := k.set.Load()

	if set == nil {
		// Without any keys there is nothing to go on with, so this call waits.
		err := k.renew(ctx, nil)

		return k.set.Load(), err
	}

	// The old keys serve while newer ones are fetched. k.fetches keeps something for each call that it joins, so none
	// is made during a fetch.
	old := k.now().Sub(set.fetched) > keysFresh
	if old && !k.busy.Load() {
		k.fetch()
	}

	return set, nil
}

// find returns the keys for alg that have the id kid; exact is then true. If there
// are none, it returns the possible keys: all keys for alg if the token names no
// key, else those without an id.
func (s *keySet) find(alg, kid string) (keys []jwt.VerificationKey, exact bool) {
	var maybe []jwt.VerificationKey
	for _, key := range s.keys {
		if key.alg != alg {
			continue
		}

		named := kid != "" && key.id == kid
		if named {
			keys = append(keys, key.key)
			continue
		}

		// A key without an id may be the one that is named; one with another id is not.
		if kid == "" || key.id == "" {
			maybe = append(maybe, key.key)
		}
	}

	if len(keys) > 0 {
		return keys, true
	}

	return maybe, false
}

// renew waits for keys that are newer than old. Without an error there are some, though they may be the same ones. The
// error is ErrKeysAway: the fetch failed, there were too many lately, or ctx ended first.
func (k *keySource) renew(ctx context.Context, old *keySet) error {
	// Another call has fetched meanwhile.
	if k.set.Load() != old {
		return nil
	}

	select {
	case <-k.fetch():
	case <-ctx.Done():
	}

	if k.set.Load() == old {
		return ErrKeysAway
	}

	return nil
}

// fetch starts a fetch, unless one is under way. When the fetch is over, the channel has an element. If there were too
// many fetches lately, or the source is closed, it is over at once.
func (k *keySource) fetch() <-chan singleflight.Result {
	return k.fetches.DoChan("", func() (any, error) {
		k.busy.Store(true)
		defer k.busy.Store(false)

		// Failures count too, so that a server in trouble is not asked more often.
		back, wait := keysRate.Take(k.back, k.now().Sub(k.began), 1)
		if wait > 0 || k.ctx.Err() != nil {
			return nil, nil
		}

		k.back = back
		set, err := k.get()
		if err == nil {
			// After a failure the old keys go on.
			k.set.Store(set)
		} else if k.failed != nil && k.ctx.Err() == nil {
			k.failed(fmt.Errorf("jwks-url: %w", err))
		}

		return nil, nil
	})
}

// CheckKeys fetches the keys of a URL once, as a server does, and returns how many of them can verify tokens. It fails
// if none of them can.
func CheckKeys(url string) (usable int, err error) {
	source := newKeySource(url, time.Now, nil)
	defer source.close()

	set, err := source.get()
	if err != nil {
		return 0, fmt.Errorf("%w; name the address of the key set", err)
	}
	if len(set.keys) == 0 {
		return 0, errors.New("none of its keys can verify a token; name the address of keys for RS256, ES256 or EdDSA")
	}

	return len(set.keys), nil
}

func (k *keySource) get() (*keySet, error) {
	ctx, cancel := context.WithTimeout(k.ctx, keysTimeout)
	defer cancel()

	req, err := http.NewRequestWithContext(ctx, http.MethodGet, k.url, nil)
	if err != nil {
		return nil, err
	}

	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	// The time before the answer, since a key that came during the fetch may be missing.
	started := k.now()
	resp, err := k.client.Do(req)
	if err != nil {
		return nil, setting.Cause(err)
	}
	defer resp.Body.Close()

	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("answered %d", resp.StatusCode)
	}

	// One byte more than is allowed shows that the answer is longer.
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxKeysSize+1))
	if err != nil {
		return nil, err
	}

	if len(body) > maxKeysSize {
		return nil, fmt.Errorf("answered more than %d bytes", maxKeysSize)
	}

	keys, err := parseKeys(body)
	if err != nil {
		return nil, err
	}

	return &keySet{keys: keys, fetched: started}, nil
}

// parseKeys reads a JWK set. It skips a key that is unknown, too weak or not for
// signatures, and keeps the others. An answer without the member "keys" is an
// error; an empty list is not.
func parseKeys(body []byte) ([]publicKey, error) {
	var set struct {
		Keys *[]json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(body, &set); err != nil {
		return nil, errors.New("answered something that is not a JWK set")
	}

	if set.Keys == nil {
		return nil, errors.New(`answered JSON without "keys"`)
	}

	var keys []publicKey
	for _, raw := range *set.Keys {
		var jwk jose.JSONWebKey
		if err := jwk.UnmarshalJSON(raw); err != nil {
			continue
		}

		key, ok := usableKey(&jwk)
		// A token may have to be tried with each of them.
		if ok && len(keys) < maxKeys {
			keys = append(keys, key)
		}
	}

	return keys, nil
}

func usableKey(jwk *jose.JSONWebKey) (publicKey, bool) {
	// A key for encryption is not meant to verify anything.
	if jwk.Use != "" && jwk.Use != "sig" {
		return publicKey{}, false
	}

	out := publicKey{id: jwk.KeyID, key: jwk.Key}
	named := jwk.Algorithm

	switch key := jwk.Key.(type) {
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return publicKey{}, false
		}
		out.alg = jwt.SigningMethodRS256.Alg()

	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() {
			return publicKey{}, false
		}
		out.alg = jwt.SigningMethodES256.Alg()

	case ed25519.PublicKey:
		if named == "Ed25519" { // RFC 9864 gives this algorithm a second name
			named = ""
		}
		out.alg = jwt.SigningMethodEdDSA.Alg()
	default: // private keys and shared secrets have no place in a public set
		return publicKey{}, false
	}

	// A key that names an algorithm serves no other.
	return out, named == "" || named == out.alg
}
