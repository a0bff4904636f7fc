package httppolicy

import (
	"fmt"
	"net/http"
)

// maxIdempotencyKey is the longest Idempotency-Key, in bytes.
const maxIdempotencyKey = 255

const idempotencyHeader = "Idempotency-Key"

// IdempotencyKey returns the request's Idempotency-Key, empty when it has none. The
// problem, if there is one, is for the client.
func IdempotencyKey(r *http.Request) (key, problem string) {
	keys := r.Header[idempotencyHeader]
	if len(keys) == 0 {
		return "", ""
	}

	valid := len(keys) == 1 && keys[0] != "" && len(keys[0]) <= maxIdempotencyKey
	if !valid {
		return "", fmt.Sprintf("An %s is one value of 1 to %d bytes; correct it, or leave it out.",
			idempotencyHeader, maxIdempotencyKey)
	}

	return keys[0], ""
}
