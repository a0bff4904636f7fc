package calls

import (
	"net/http"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"
	"github.com/rs/zerolog"

	"headcount/gateway/httppolicy"
)

// Handler carries out a call. It may set headers of the answer.
type Handler func(*gin.Context) (Answer, error)

// Answer is what a call is answered with.
type Answer struct {
	Status int    // 0: 200
	Type   string // the media type of the body
	Body   []byte
	Packed bool // the body is compressed for a client that accepts gzip

	buffer *[]byte // belongs to buffers, and has the body
}

// TypeJSON is the media type of JSON.
const TypeJSON = "application/json"

// taken is the status of an answer that its handler has written itself.
const taken = -1

// Answers without a body.
var (
	NoContent = Answer{Status: http.StatusNoContent}
	Unchanged = Answer{Status: http.StatusNotModified} // see httppolicy.NotModified
	// Taken says that the handler has taken over the connection and has answered by itself: with an event stream, or
	// with an upgrade.
	Taken = Answer{Status: taken}
)

// JSON returns an answer with a JSON text and a line end, for terminals. Nobody else may append to text.
func JSON(text []byte) Answer { return Answer{Type: TypeJSON, Body: append(text, '\n')} }

// PackedJSON is JSON, compressed for a client that accepts gzip.
func PackedJSON(text []byte) Answer { return Packed(TypeJSON, append(text, '\n')) }

// Packed returns an answer that is compressed for a client that accepts gzip.
func Packed(mediaType string, body []byte) Answer {
	return Answer{Type: mediaType, Body: body, Packed: true}
}

// maxBuffer is the largest buffer that is kept, in bytes. A larger one was made for a rare, long list.
const maxBuffer = 512 << 10

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// Buffer returns an empty buffer for the JSON of an answer. It belongs to the caller until BufferedJSON.
func Buffer() *[]byte {
	buffer := buffers.Get().(*[]byte)
	*buffer = (*buffer)[:0]

	return buffer
}

// BufferedJSON is JSON with the text in a buffer, which is used again once the answer is written.
func BufferedJSON(buffer *[]byte) Answer {
	*buffer = append(*buffer, '\n')
	return Answer{Type: TypeJSON, Body: *buffer, buffer: buffer}
}

// Serve returns the function that carries out a call and writes what it is answered with. Nothing else writes answers
// of calls, but for those that are long connections.
func Serve(log zerolog.Logger, h Handler) gin.HandlerFunc {
	// Each call has a refuser of its own, which logs malformed data once a minute.
	refuser := newRefuser(log)

	return func(c *gin.Context) {
		answer, err := h(c)
		if err != nil {
			refuser.refuse(c, err)
			return
		}

		answer.write(c)
	}
}

// Guard returns a function that refuses a request before its call when check returns an error.
func Guard(log zerolog.Logger, check func(*gin.Context) error) gin.HandlerFunc {
	refuser := newRefuser(log)

	return func(c *gin.Context) {
		if err := check(c); err != nil {
			refuser.refuse(c, err)
			c.Abort()
		}
	}
}

// CheckKey returns a check for Guard: it refuses a wrong API key, also where none is needed, because a server that
// mistyped its key would be counted as a visitor. Upgrades are left to their own handlers, which refuse each in its
// form.
func CheckKey(isKey func(key string) bool) func(*gin.Context) error {
	return func(c *gin.Context) error {
		key := httppolicy.APIKey(c.Request)
		if key == "" || c.FullPath() == "" || IsUpgrade(c) || isKey(key) {
			return nil
		}

		return errWrongKey
	}
}

// IsUpgrade reports whether a request opens a WebSocket. Elsewhere the headers of an upgrade mean nothing, and must not
// spare a call its checks.
func IsUpgrade(c *gin.Context) bool {
	path := c.FullPath()
	takes := path == SocketPath || strings.HasPrefix(path, PusherRoot)

	return takes && c.IsWebsocket()
}

func (a *Answer) write(c *gin.Context) {
	switch a.Status {
	case taken:
		return
	case http.StatusNoContent, http.StatusNotModified:
		httppolicy.AnswerNothing(c.Writer, a.Status)
		return
	case 0:
		a.Status = http.StatusOK
	}

	if a.Packed && httppolicy.WantsGzip(c.Request) {
		c.Writer.Header().Set("Content-Encoding", "gzip")
		a.Body = httppolicy.Gzip(nil, a.Body)
	}
	httppolicy.Answer(c.Writer, a.Status, a.Type, a.Body)

	// The client has the answer, so the buffer may serve the next one.
	if a.buffer != nil && cap(*a.buffer) <= maxBuffer {
		buffers.Put(a.buffer)
	}
}
