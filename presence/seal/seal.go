// Package seal signs the messages between the processes of a cluster, and refuses messages
// that are forged, too old, from the future or replayed.
package seal

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
)

const (
	Size   = 16 // bytes of a signature: HMAC-SHA256, truncated
	IDSize = 4  // bytes of a key id
)

// ErrConfig is in every error about settings that cannot work.
var ErrConfig = errors.New("bad setting")

// Refusal is the reason for refusing a message. Reasons are few and short, to be used as
// the label of a metric.
type Refusal struct{ Reason, text string }

func (r *Refusal) Error() string { return r.text }

// NewRefusal returns a Refusal for a reason that another package defines.
func NewRefusal(reason, text string) *Refusal { return &Refusal{reason, text} }

// Refusals of this package.
var (
	ErrKey      = NewRefusal("key", "signed with an unknown key, or not signed")
	ErrForged   = NewRefusal("forged", "the signature is wrong")
	ErrClock    = NewRefusal("clock", "this process does not know the time of the cluster yet")
	ErrOld      = NewRefusal("old", "sent too long ago")
	ErrFuture   = NewRefusal("future", "sent in the future: the clocks differ too much")
	ErrReplayed = NewRefusal("replayed", "received before, or overtaken by too many others")
	ErrSenders  = NewRefusal("senders", "too many senders")
)

// ReasonOf returns the reason of the Refusal in err, or "other".
func ReasonOf(err error) string {
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return r.Reason
	}
	return "other"
}

// ID names a key without revealing it. The zero ID says that there is no key.
type ID [IDSize]byte

// Keys are the keys of a cluster's secrets for one purpose: the first signs, all
// verify. To change a secret, add the new secret at the end in every process, then
// move it to the front, then remove the old one. Keys do not change; any goroutine
// may use them.
type Keys struct{ keys []key }

type key struct {
	id     ID
	secret []byte
}

// NewKeys derives keys from the cluster's secrets. Every purpose has its own keys, so a
// signature for one purpose does not verify for another. Without secrets nothing is
// signed, and only unsigned messages verify.
func NewKeys(secrets [][]byte, purpose string) (*Keys, error) {
	k := &Keys{}
	for i, s := range secrets {
		if len(s) == 0 {
			return nil, fmt.Errorf("seal: %w: cluster secret %d is empty", ErrConfig, i+1)
		}

		h := hmac.New(sha256.New, s)
		h.Write([]byte("headcount " + purpose))
		secret := h.Sum(nil)

		// The id is that of the derived key, so it reveals nothing about the secret.
		sum := sha256.Sum256(secret)
		id := ID(sum[:])
		// The zero ID says that there is no key.
		if id == (ID{}) {
			id[0] = 1
		}

		k.keys = append(k.keys, key{id, secret})
	}

	return k, nil
}

// Signed reports whether there are any keys.
func (k *Keys) Signed() bool { return len(k.keys) > 0 }

// Signer returns a Signer with these keys.
func (k *Keys) Signer() *Signer {
	// The hashes are made once, and reset for each message, so that signing does not allocate.
	s := &Signer{}
	for _, key := range k.keys {
		s.macs = append(s.macs, mac{key.id, hmac.New(sha256.New, key.secret)})
	}

	return s
}

// Signer signs and verifies without allocating. One goroutine at a time may use it.
type Signer struct {
	macs []mac
	sum  [sha256.Size]byte
}

type mac struct {
	id   ID
	hash hash.Hash
}

// ID returns the id of the key that signs.
func (s *Signer) ID() ID {
	if len(s.macs) == 0 {
		return ID{}
	}
	return s.macs[0].id
}

// Sign appends the signature of message to b. Without keys the signature is zeros.
func (s *Signer) Sign(b, message []byte) []byte {
	if len(s.macs) == 0 {
		return append(b, make([]byte, Size)...)
	}
	return append(b, s.of(s.macs[0], message)...)
}

// Derive returns a further key from the key with that id, nil if there is none. Who does not know the secret learns
// nothing about one from the other.
func (s *Signer) Derive(id ID, purpose []byte) []byte {
	for _, m := range s.macs {
		if m.id == id {
			// A copy, since the next call of the Signer overwrites what of returns.
			return append([]byte{}, s.of(m, purpose)...)
		}
	}

	return nil
}

// of returns the signature of message, which is valid until the next call.
func (s *Signer) of(m mac, message []byte) []byte {
	m.hash.Reset()
	m.hash.Write(message)
	return m.hash.Sum(s.sum[:0])[:Size]
}

// Verify returns nil when the key with that id made signature for message, and
// ErrKey or ErrForged otherwise.
func (s *Signer) Verify(id ID, message, signature []byte) error {
	// Neither side has secrets. If only one of them has, the message is refused below.
	if len(s.macs) == 0 && id == (ID{}) {
		return nil
	}

	for _, m := range s.macs {
		if m.id != id {
			continue
		}
		if !hmac.Equal(s.of(m, message), signature) {
			return ErrForged
		}
		return nil
	}

	return ErrKey
}
