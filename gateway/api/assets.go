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

	"headcount/gateway/httppolicy"
	"headcount/gateway/openapi"
)

// contentPolicy lets our own pages load and run only what this server sends.
const contentPolicy = "default-src 'self'; connect-src 'self' ws: wss:; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// asset is a file that is part of the program. It never changes.
type asset struct {
	kind   string
	hash   string // of the body; a strong ETag names exact bytes, so that of a packed body has another end
	body   []byte
	gzip   func() []byte // the body in gzip; the first call packs it, so that the start need not wait
	brotli func() []byte // the same in brotli
}

func newAsset(name string, body []byte) asset {
	sum := sha256.Sum256(body)
	return asset{
		kind: kindOf(name), hash: hex.EncodeToString(sum[:12]), body: body,
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

// encoded returns the asset as the request takes it, and the encoding, which is empty for none.
func (a *asset) encoded(r *http.Request) (body []byte, encoding string) {
	switch {
	case httppolicy.WantsBrotli(r):
		return a.brotli(), "br"
	case httppolicy.WantsGzip(r):
		return a.gzip(), "gzip"
	}

	return a.body, ""
}

// forever reports whether the request names the very content: /-/live.js?1a2b3c4d. headcount.js names its parts like
// this. The hash is in the query rather than in the path, so that a page which was loaded before an upgrade still gets
// the part.
func (a *asset) forever(r *http.Request) bool { return r.URL.RawQuery == a.hash[:8] }

// kindOf returns the media type of a file. To many systems .ts is a video.
func kindOf(name string) string {
	if path.Ext(name) == ".ts" {
		return "text/plain; charset=utf-8"
	}
	return mime.TypeByExtension(path.Ext(name))
}

// serve answers with the asset. An answer with a status other than 200 has no
// ETag.
func (a *asset) serve(c *gin.Context, status int) {
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
	if status == http.StatusOK && httppolicy.NotModified(c, `"`+etag+`"`) {
		return
	}

	if encoding != "" {
		h.Set("Content-Encoding", encoding)
	}
	httppolicy.AnswerWith(c.Writer, status, a.kind, body)
}

// assets adds the demo page, the browser client and the documents of the contract. Pages of any origin may load
// the scripts; --allow-origins decides what those scripts may do.
func (a *API) assets(e *gin.Engine) {
	entries, err := fs.ReadDir(a.cfg.Assets, ".")
	if err != nil {
		panic(err) // the files are part of the program
	}
	public := func(file asset) gin.HandlerFunc {
		return func(c *gin.Context) {
			if h := c.Writer.Header(); h.Get("Access-Control-Allow-Origin") == "" {
				h.Set("Access-Control-Allow-Origin", "*")
			}
			file.serve(c, http.StatusOK)
		}
	}
	documents := map[string][]byte{"openapi.json": openapi.OpenAPI(a.cfg.BasePath), "asyncapi.json": openapi.AsyncAPI(a.cfg.BasePath)}
	for name, body := range documents {
		httppolicy.Get(e, "/-/"+name, public(newAsset(name, body)))
	}
	for _, f := range entries {
		body, err := fs.ReadFile(a.cfg.Assets, f.Name())
		if err != nil {
			panic(err) // the files are part of the program
		}
		file := newAsset(f.Name(), body)
		switch f.Name() {
		case "index.html":
			httppolicy.Get(e, "/", public(file))
		case "dashboard.html":
			a.dashboard(e, file)
		case "icon.svg": // browsers ask for favicon.ico where a page names no icon
			httppolicy.Get(e, "/favicon.ico", public(file))
			fallthrough
		default:
			httppolicy.Get(e, "/-/"+f.Name(), public(file))
		}
	}
}
