package policy

import (
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"
)

// Get adds a route for GET, and for HEAD, whose answer has no body.
func Get(e *gin.Engine, path string, h gin.HandlerFunc) {
	e.GET(path, h)
	e.HEAD(path, h)
}

// Answer answers 200 with a body that no cache may keep.
func Answer(w http.ResponseWriter, contentType string, body []byte) {
	AnswerWith(w, http.StatusOK, contentType, body)
}

// AnswerWith is Answer with another status.
func AnswerWith(w http.ResponseWriter, status int, contentType string, body []byte) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}
