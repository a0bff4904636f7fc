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

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/openapi"
)

// contentPolicy lets our own pages load and run only what this server sends.
const contentPolicy = "default-src 'self'; connect-src 'self' ws: wss:; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// asset is a file that is part of the program. It never changes.
type asset struct {
	kind   string
	etags  [2]string // of body and of packed; a strong ETag names exact bytes, so they differ
	body   []byte
	packed func() []byte // body with gzip; the first call packs it, so that the start need not wait
}

func newAsset(name string, body []byte) asset {
	sum := sha256.Sum256(body)
	hash := hex.EncodeToString(sum[:12])
	return asset{
		kind: kindOf(name), etags: [2]string{`"` + hash + `"`, `"` + hash + `-gzip"`},
		body: body, packed: sync.OnceValue(func() []byte { return pack(body) }),
	}
}

func pack(body []byte) []byte {
	var packed bytes.Buffer
	w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // fails only for an unknown level
	w.Write(body)                                              // a Buffer takes everything
	w.Close()
	return packed.Bytes()
}

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
	httppolicy.AddVary(h, "Accept-Encoding")
	if strings.HasPrefix(a.kind, "text/html") {
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("Referrer-Policy", "same-origin")
	}
	packs := httppolicy.WantsGzip(c.Request)
	etag := a.etags[0]
	if packs {
		etag = a.etags[1]
	}
	if status == http.StatusOK && httppolicy.NotModified(c, etag) {
		return
	}
	out := a.body
	if packs {
		out = a.packed()
		h.Set("Content-Encoding", "gzip")
	}
	httppolicy.AnswerWith(c.Writer, status, a.kind, out)
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
