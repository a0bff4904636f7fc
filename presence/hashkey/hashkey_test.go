package hashkey_test

import (
	"bytes"
	"errors"
	"testing"

	"headcount/presence/hashkey"
)

func TestSecretsRotateAroundAKey(t *testing.T) {
	key := hashkey.New()
	first, second := []byte("first"), []byte("second")

	seals := map[string]string{hashkey.ID(first): hashkey.Seal(first, key)}

	for _, secrets := range [][][]byte{{first}, {first, second}, {second, first}} {
		if got, err := hashkey.Open(secrets, seals); err != nil || !bytes.Equal(got, key) {
			t.Fatalf("Open with %q: %x, %v", secrets, got, err)
		}
	}

	if _, err := hashkey.Open([][]byte{second}, seals); !errors.Is(err, hashkey.ErrSealed) {
		t.Fatalf("Open with another secret: %v, want ErrSealed", err)
	}

	// The next step of a rotation adds the seal of the new secret.
	seals[hashkey.ID(second)] = hashkey.Seal(second, key)
	if got, err := hashkey.Open([][]byte{second}, seals); err != nil || !bytes.Equal(got, key) {
		t.Fatalf("Open after the step: %x, %v", got, err)
	}

	seals[hashkey.ID(second)] = seals[hashkey.ID(first)]
	if _, err := hashkey.Open([][]byte{second}, seals); err == nil {
		t.Fatal("a seal was opened with another secret")
	}
}
