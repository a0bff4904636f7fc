package httppolicy

import (
	"net/http"

	"github.com/gin-gonic/gin"
)

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

// RefuseWrongKeys returns a handler that refuses requests with a wrong API key, also where none is needed: a server
// that mistyped its key would be counted as a visitor. Upgrades are left to their own handlers, which refuse each in
// its form.
func RefuseWrongKeys(isKey func(key string) bool) gin.HandlerFunc {
	return func(c *gin.Context) {
		key := APIKey(c.Request)
		wrong := key != "" && !isKey(key)
		if wrong && c.FullPath() != "" && !c.IsWebsocket() {
			RefuseKey(c.Writer, "The API key in the header "+APIKeyHeader+" is wrong; "+
				"send one of --api-key, or none for what is public.")
			c.Abort()
		}
	}
}

// RefuseKey answers a request whose API key is wrong, or that lacks one.
func RefuseKey(w http.ResponseWriter, detail string) {
	w.Header().Set("WWW-Authenticate", `API-Key realm="headcount"`)
	Problem(w, http.StatusUnauthorized, detail, Because(ReasonAPIKey))
}
