// Package hashkey makes, seals and opens the key of a cluster's user hashes. The key is
// random, and never changes. It is stored sealed with each of the secrets that sign
// anonymous ids: any of them opens it, and secrets can rotate without changing a hash.
package hashkey

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
)

// Size is the length of a key in bytes.
const Size = 32

const sealUse = "headcount hash key seal"

// ErrSealed says that no secret opens any of the seals.
var ErrSealed = errors.New("no --id-secret decrypts the key of user hashes")

// New makes a key.
func New() []byte {
	key := make([]byte, Size)
	rand.Read(key) // never fails; the runtime ends the process instead
	return key
}

// ID names a secret without revealing it.
func ID(secret []byte) string {
	// Derived for this use, so that it says nothing about the keys that are derived from the secret.
	id, err := hkdf.Key(sha256.New, secret, nil, "headcount hash key id", 8)
	if err != nil {
		panic(err) // cannot happen: the length is valid
	}
	return hex.EncodeToString(id)
}

// Cipher returns a cipher with a key for one use, derived from a secret. It makes nonces itself.
func Cipher(secret []byte, use string) cipher.AEAD {
	key, err := hkdf.Key(sha256.New, secret, nil, use, 32)
	if err != nil {
		panic(err) // as above
	}

	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err)
	}

	// A random nonce for each text, because processes that seal with one key do not know of each other.
	a, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(err)
	}

	return a
}

// Seal returns key sealed with a secret, as text.
func Seal(secret, key []byte) string {
	return hex.EncodeToString(Cipher(secret, sealUse).Seal(nil, nil, key, []byte(ID(secret))))
}

// Open returns the key from one of the seals, which are indexed by the ID of their secret.
// The error is ErrSealed, or says that a seal is damaged.
func Open(secrets [][]byte, seals map[string]string) ([]byte, error) {
	for _, secret := range secrets {
		// Any of the seals will do, because all of them have the same key in them.
		text, is := seals[ID(secret)]
		if !is {
			continue
		}

		sealed, err := hex.DecodeString(text)
		if err != nil {
			return nil, fmt.Errorf("hashkey: a seal is damaged: %w", err)
		}

		key, err := Cipher(secret, sealUse).Open(nil, nil, sealed, []byte(ID(secret)))
		if err != nil {
			return nil, fmt.Errorf("hashkey: a seal is damaged: %w", err)
		}

		return key, nil
	}

	return nil, fmt.Errorf("hashkey: %w", ErrSealed)
}
