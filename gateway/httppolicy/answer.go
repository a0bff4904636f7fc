package httppolicy

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

// Values of headers that are the same in all answers. They must not be changed in place.
var (
	noStore    = []string{"no-store"}
	noSniff    = []string{"nosniff"}
	varyOrigin = []string{"Origin"}
)

// Answer writes an answer with status 200 and a body that no cache may keep.
func Answer(w http.ResponseWriter, contentType string, body []byte) {
	AnswerWith(w, http.StatusOK, contentType, body)
}

// AnswerWith is Answer with another status.
func AnswerWith(w http.ResponseWriter, status int, contentType string, body []byte) {
	h := w.Header()
	own := []string{contentType, strconv.Itoa(len(body))} // one allocation for both
	h["Content-Type"], h["Content-Length"] = own[0:1:1], own[1:2:2]
	h["Cache-Control"], h["X-Content-Type-Options"] = noStore, noSniff
	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}
