package identity

import (
	"crypto/sha256"
	"crypto/subtle"
)

// APIKeys are the hashed keys of servers. Since they are hashed, comparing takes the
// same time for every presented key.
type APIKeys [][sha256.Size]byte

// NewAPIKeys returns the set of these keys. An empty set accepts no key.
func NewAPIKeys(keys []string) APIKeys {
	hashes := make(APIKeys, len(keys))
	for i, k := range keys {
		hashes[i] = sha256.Sum256([]byte(k))
	}
	return hashes
}

// Has reports whether key is in the set.
func (k APIKeys) Has(key string) bool {
	sum, found := sha256.Sum256([]byte(key)), 0
	for i := range k {
		found |= subtle.ConstantTimeCompare(k[i][:], sum[:])
	}
	return found == 1
}
