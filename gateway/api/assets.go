package api

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"sync"

	"github.com/andybalholm/brotli"
	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

// contentPolicy lets our own pages load and run only what this server sends.
const contentPolicy = "default-src 'self'; connect-src 'self' ws: wss:; object-src 'none'; frame-ancestors " +
	"'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// asset is a file that is part of the program. It never changes.
type asset struct {
	kind   string
	hash   string // of the body; the ETag of a packed body has another suffix, because a strong ETag names exact bytes
	body   []byte
	gzip   func() []byte // the body in gzip; packed at the first call, so that it does not delay the start
	brotli func() []byte // the same in brotli
}

func newAsset(name string, body []byte) *asset {
	sum := sha256.Sum256(body)

	return &asset{
		kind: kindOf(name),
		hash: hex.EncodeToString(sum[:12]),
		body: body,
		// Packing takes long, so a file is packed once, and only when somebody takes it like that.
		gzip:   sync.OnceValue(func() []byte { return packGzip(body) }),
		brotli: sync.OnceValue(func() []byte { return packBrotli(body) }),
	}
}

func packGzip(body []byte) []byte {
	var packed bytes.Buffer
	w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // fails only for an unknown level
	w.Write(body)                                              // a Buffer takes everything
	w.Close()
	return packed.Bytes()
}

// packBrotli has a window of 64 KiB, because assets are no larger and a window takes several times its size in memory.
func packBrotli(body []byte) []byte {
	var packed bytes.Buffer
	w := brotli.NewWriterOptions(&packed, brotli.WriterOptions{Quality: brotli.BestCompression, LGWin: 16})
	w.Write(body) // a Buffer takes everything
	w.Close()
	return packed.Bytes()
}

// encoded returns the asset in an encoding that the request accepts, and the encoding's name, empty for none.
func (a *asset) encoded(r *http.Request) (body []byte, encoding string) {
	switch {
	// First, because brotli is smaller.
	case httppolicy.WantsBrotli(r):
		return a.brotli(), "br"
	case httppolicy.WantsGzip(r):
		return a.gzip(), "gzip"
	}

	return a.body, ""
}

// forever reports whether the URL names the exact content, like /-/live.js?1a2b3c4d, as headcount.js names its parts.
// The hash is in the query and not in the path, so that a page which was loaded before an upgrade still gets the part.
func (a *asset) forever(r *http.Request) bool { return r.URL.RawQuery == a.hash[:8] }

// kindOf returns the media type of a file. It does not ask the system, because many systems take .ts for a video.
func kindOf(name string) string {
	if path.Ext(name) == ".ts" {
		return "text/plain; charset=utf-8"
	}
	return mime.TypeByExtension(path.Ext(name))
}

// answer returns the answer with the asset. An answer with a status other than 200 has no
// ETag.
func (a *asset) answer(c *gin.Context, status int) calls.Answer {
	// Browsers must ask each time whether a file has changed, unless the URL names its content.
	h := c.Writer.Header()
	h.Set("Cache-Control", "no-cache")
	if status == http.StatusOK && a.forever(c.Request) {
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	httppolicy.AddVary(h, "Accept-Encoding")
	if strings.HasPrefix(a.kind, "text/html") {
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("Referrer-Policy", "same-origin")
	}

	body, encoding := a.encoded(c.Request)
	etag := a.hash
	if encoding != "" {
		etag += "-" + encoding
	}

	// With another status the page is the body of a refusal, so 304 would be wrong.
	if status == http.StatusOK && httppolicy.NotModified(c, `"`+etag+`"`) {
		return calls.Unchanged
	}
	if encoding != "" {
		h.Set("Content-Encoding", encoding)
	}

	return calls.Answer{Status: status, Type: a.kind, Body: body}
}

// answerAnyone is answer for pages of any origin, which may load the scripts; --allow-origins decides what those
// scripts may do.
func (a *asset) answerAnyone(c *gin.Context) (calls.Answer, error) {
	h := c.Writer.Header()
	// CORS has named the origin if it is an allowed one, whose request may have credentials.
	if h.Get("Access-Control-Allow-Origin") == "" {
		h.Set("Access-Control-Allow-Origin", "*")
	}

	return a.answer(c, http.StatusOK), nil
}

// Files that have their own row in the table of calls.
const (
	demoFile      = "index.html"
	scriptFile    = "headcount.js"
	dashboardFile = "dashboard.html"
)

// readFiles returns the files of the browser client and of our own pages, by their names.
func readFiles(assets fs.FS) map[string]*asset {
	entries, err := fs.ReadDir(assets, ".")
	if err != nil {
		panic(err) // the files are part of the program
	}

	files := map[string]*asset{}
	for _, f := range entries {
		body, err := fs.ReadFile(assets, f.Name())
		if err != nil {
			panic(err) // the files are part of the program
		}
		files[f.Name()] = newAsset(f.Name(), body)
	}

	return files
}

// file returns the handler of a file, or nil if there is no such file.
func (a *API) file(name string) calls.Handler {
	file := a.files[name]
	if file == nil {
		return nil
	}

	return file.answerAnyone
}

// otherFiles returns the calls for the files that the scripts and pages load.
func (a *API) otherFiles() []calls.Call {
	// Browsers ask for favicon.ico if a page names no icon.
	others := []calls.Call{{Method: http.MethodGet, Path: "/favicon.ico", Do: a.file("icon.svg")}}

	for name := range a.files {
		switch name {
		case demoFile, scriptFile, dashboardFile:
		default:
			others = append(others, calls.Call{Method: http.MethodGet, Path: "/-/" + name, Do: a.file(name)})
		}
	}

	return others
}

// getOpenAPI answers with the document of the calls.
func (a *API) getOpenAPI(c *gin.Context) (calls.Answer, error) { return a.openAPI().answerAnyone(c) }

// getAsyncAPI answers with the document of the frames and events.
func (a *API) getAsyncAPI(c *gin.Context) (calls.Answer, error) { return a.asyncAPI().answerAnyone(c) }
