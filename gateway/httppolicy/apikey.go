package httppolicy

import "net/http"

// APIKeyHeader is the header with an API key, in the spelling of the documentation.
const APIKeyHeader = "X-API-Key"

// APIKey returns the API key in the request, or "" if there is none.
func APIKey(r *http.Request) string {
	// This is net/http's spelling of the header. Any other spelling would cost a new string
	// at each call.
	if keys := r.Header["X-Api-Key"]; len(keys) > 0 {
		return keys[0]
	}
	return ""
}
