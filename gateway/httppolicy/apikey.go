package httppolicy

import "net/http"

// APIKeyHeader is the header that carries an API key, as people write it.
const APIKeyHeader = "X-API-Key"

// APIKey returns the API key that the request carries, empty when it carries none.
func APIKey(r *http.Request) string {
	// This is how net/http spells the header. For another spelling it would make a new
	// string at each look.
	if keys := r.Header["X-Api-Key"]; len(keys) > 0 {
		return keys[0]
	}
	return ""
}
