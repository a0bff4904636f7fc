package identity

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/golang-jwt/jwt/v5"
)

// Errors of Identify, for errors.Is. No error text repeats any part of the token.
var (
	ErrNoToken  = errors.New("no token: this server requires a JWT")
	ErrBadToken = errors.New("bad token")
	// errOthers: it is a token, but not one that was signed for this server.
	errOthers = fmt.Errorf("%w", ErrBadToken)
	// ErrKeysAway: the key that signed the token is unknown and the keys cannot be fetched
	// now, or were fetched too often lately, so the token may be good or bad. The caller should try again later.
	ErrKeysAway = errors.New("the keys that verify tokens cannot be fetched now")
)

func badToken(why string) error { return fmt.Errorf("%w: %s", ErrBadToken, why) }

func othersToken(why string) error { return fmt.Errorf("%w: %s", errOthers, why) }

// fromToken returns the user a token names.
func (ids *Identities) fromToken(ctx context.Context, raw string) (Identity, error) {
	if raw == "" {
		return Identity{}, badToken("it is empty")
	}
	// Checking a signature takes longer the longer the token is.
	if len(raw) > maxToken {
		return Identity{}, badToken("it is too long")
	}

	// The signature comes first: before that, nothing in the token means anything.
	claims, err := ids.verifyToken(ctx, raw)
	if err != nil {
		return Identity{}, err
	}

	expires, err := checkTimes(claims, ids.cfg.Now(), ids.cfg.Leeway)
	if err != nil {
		return Identity{}, err
	}

	if err := ids.checkPurpose(claims); err != nil {
		return Identity{}, err
	}

	sub, err := subject(claims)
	if err != nil {
		return Identity{}, err
	}

	return Identity{User: sub, Expires: expires, Pages: pages(claims)}, nil
}

// pages returns the strings of the claim "pages". Other applications may use the claim for something else, so a claim
// that is no list of strings opens nothing.
func pages(claims jwt.MapClaims) (open []string) {
	list, _ := claims["pages"].([]any)
	for _, one := range list {
		if page, ok := one.(string); ok && page != "" {
			open = append(open, page)
		}
	}

	return open
}

// verifyToken returns the claims of a token if its signature is valid.
func (ids *Identities) verifyToken(ctx context.Context, raw string) (jwt.MapClaims, error) {
	claims, set, err := ids.verifySignature(ctx, raw)
	// Without a set no other key can help.
	if err == nil || set == nil {
		return claims, err
	}

	// The issuer may have changed its keys since the last fetch. As long as nobody knows that, the token may be good: a
	// refusal would log its user out.
	if err := ids.keys.renew(ctx, set); err != nil {
		return nil, err
	}
	claims, _, err = ids.verifySignature(ctx, raw)

	return claims, err
}

// verifySignature is verifyToken with the keys that are known now. set is not nil if it
// has no key of the token's key id, so that another set might have the right key. The
// claims are a map, since a struct would accept a member "SUB" as "sub".
func (ids *Identities) verifySignature(ctx context.Context, raw string) (claims jwt.MapClaims, set *keySet, err error) {
	var keyErr error // why there is no key to verify with
	claims = jwt.MapClaims{}
	token, err := ids.parser.ParseWithClaims(raw, claims, func(t *jwt.Token) (key any, _ error) {
		key, set, keyErr = ids.findKey(ctx, t)
		return key, keyErr
	})

	switch {
	case err == nil:
		return claims, nil, nil
	case keyErr != nil:
		return nil, set, keyErr
	case errors.Is(err, jwt.ErrTokenMalformed):
		return nil, nil, badToken("it is malformed")
	case !ids.accepts(token):
		return nil, nil, othersToken("its algorithm is not accepted")
	default:
		return nil, set, othersToken("its signature is wrong")
	}
}

// accepts reports whether the token is signed with an algorithm that is accepted.
func (ids *Identities) accepts(token *jwt.Token) bool {
	return token != nil && token.Method != nil && slices.Contains(ids.methods, token.Method.Alg())
}

// findKey returns the key or keys to verify t with, and set as verifySignature does. The
// parser calls it only for accepted algorithms. findKey chooses the key by the algorithm, so
// a public key never serves as a secret.
func (ids *Identities) findKey(ctx context.Context, t *jwt.Token) (key any, set *keySet, err error) {
	if _, critical := t.Header["crit"]; critical {
		return nil, nil, badToken("it demands unknown extensions") // RFC 7515, 4.1.11
	}

	// A secret has no key set, so there is nothing to fetch for it.
	if t.Method == jwt.SigningMethodHS256 {
		return ids.secrets, nil, nil
	}

	set, err = ids.keys.current(ctx)
	if err != nil {
		return nil, nil, err
	}

	// Without a kid that is text all keys of the algorithm are tried.
	kid, _ := t.Header["kid"].(string)
	found, exact := set.find(t.Method.Alg(), kid)

	verifying := jwt.VerificationKeySet{Keys: found}
	switch {
	case exact:
		return verifying, nil, nil
	case len(found) == 0:
		return nil, set, othersToken("the key that signed it is unknown")
	default:
		return verifying, set, nil
	}
}

// checkTimes returns when the token expires; zero means never. Its error says why
// the token is not valid now. Only the nbf has a leeway: a token that has expired was once given for a time.
func checkTimes(claims jwt.MapClaims, now time.Time, leeway time.Duration) (expires time.Time, err error) {
	if v, ok := claims["exp"]; ok {
		expires, ok = numericDate(v)
		if !ok {
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
		if now.Add(leeway).Before(from) {
			return time.Time{}, badToken("it is not valid yet")
		}
	}

	return expires, nil
}

// checkPurpose returns an error for a token of another issuer or for another audience: many
// applications may share the keys that sign tokens.
func (ids *Identities) checkPurpose(claims jwt.MapClaims) error {
	if len(ids.cfg.Issuers) > 0 {
		iss, err := claims.GetIssuer()
		if err != nil || !slices.Contains(ids.cfg.Issuers, iss) {
			return othersToken("its iss is another")
		}
	}

	if len(ids.cfg.Audiences) > 0 {
		aud, err := claims.GetAudience()
		ours := func(one string) bool { return slices.Contains(ids.cfg.Audiences, one) }
		if err != nil || !slices.ContainsFunc(aud, ours) {
			return othersToken("its aud is another")
		}
	}

	return nil
}

// numericDate reads seconds since 1970. It limits them to about 34,000 years on
// either side of 1970, where time.Time still computes correctly.
func numericDate(v any) (time.Time, bool) {
	f, ok := v.(float64)
	if !ok {
		return time.Time{}, false
	}

	const limit = 1 << 40
	seconds, fraction := math.Modf(max(-limit, min(limit, f)))

	return time.Unix(int64(seconds), int64(fraction*1e9)), true
}

// subject returns the token's sub, if it is a valid user id.
func subject(claims jwt.MapClaims) (string, error) {
	sub, ok := claims["sub"].(string)
	if !ok || sub == "" {
		return "", badToken("it has no sub, or one that is not text")
	}
	if len(sub) > maxUser {
		return "", badToken("its sub is too long")
	}
	if !isPlain(sub) {
		return "", badToken("its sub is not plain text")
	}

	return sub, nil
}

// CheckUser returns an error if id cannot be a user id. It allows every value that
// a token's sub may have.
func CheckUser(id string) error {
	if id == "" || len(id) > maxUser || !utf8.ValidString(id) || !isPlain(id) {
		return fmt.Errorf("a user id is 1 to %d bytes of plain text", maxUser)
	}

	return nil
}

// isPlain reports whether text has neither control characters nor U+FFFD. Control
// characters would reach logs and frames. U+FFFD would make different broken texts
// equal.
func isPlain(text string) bool {
	return !strings.ContainsFunc(text, func(c rune) bool { return c == utf8.RuneError || unicode.IsControl(c) })
}

// presentedToken returns the token of r and whether there is one. The token of the URL, which a client gives on
// purpose, comes before that of the header, which a proxy may have set. An empty token counts as presented.
func presentedToken(r *http.Request, query bool) (string, bool) {
	if query {
		if tokens := queryValues(r, "token"); len(tokens) > 0 {
			return tokens[0], true
		}
	}

	for _, v := range r.Header["Authorization"] {
		scheme, token, _ := strings.Cut(strings.TrimSpace(v), " ")
		// Another scheme is for somebody else, such as a proxy that asks for a password.
		if strings.EqualFold(scheme, "Bearer") {
			return strings.TrimSpace(token), true
		}
	}

	return "", false
}
