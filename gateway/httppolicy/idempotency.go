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
	if len(keys) > 1 || keys[0] == "" || len(keys[0]) > maxIdempotencyKey {
		const form = "An %s is one value of 1 to %d bytes; correct it, or leave it out."
		return "", fmt.Sprintf(form, idempotencyHeader, maxIdempotencyKey)
	}

	return keys[0], ""
}
