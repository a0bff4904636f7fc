package gateway

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"
)

// policy is what our own pages may do: nothing that comes from elsewhere.
const policy = "default-src 'self'; connect-src 'self' ws: wss:; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// asset is a file that is part of the program. It never changes.
type asset struct {
	kind, etag   string
	body, packed []byte
}

func newAsset(files fs.FS, name string) asset {
	body, err := fs.ReadFile(files, name)
	if err != nil {
		panic(err) // it is part of the program
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		panic(err) // the level is a constant
	}
	w.Write(body) // a Buffer takes everything
	w.Close()
	sum := sha256.Sum256(body)
	return asset{
		kind: mime.TypeByExtension(path.Ext(name)), etag: `"` + hex.EncodeToString(sum[:12]) + `"`,
		body: body, packed: packed.Bytes(),
	}
}

// serve answers with the asset; a status other than 200 is not to be kept.
func (a *asset) serve(c *gin.Context, status int) {
	h := c.Writer.Header()
	h.Set("Content-Type", a.kind)
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Content-Type-Options", "nosniff")
	addVary(h, "Accept-Encoding")
	if strings.HasPrefix(a.kind, "text/html") {
		h.Set("Content-Security-Policy", policy)
		h.Set("Referrer-Policy", "same-origin")
	}
	if status == http.StatusOK {
		h.Set("ETag", a.etag)
		if c.GetHeader("If-None-Match") == a.etag {
			c.Status(http.StatusNotModified)
			return
		}
	}
	out := a.body
	if wantsGzip(headerList(c.Request.Header, "Accept-Encoding")) {
		h.Set("Content-Encoding", "gzip")
		out = a.packed
	}
	h.Set("Content-Length", strconv.Itoa(len(out)))
	c.Writer.WriteHeader(status)
	_, _ = c.Writer.Write(out) // the client may be gone
}

// assets serves the demo page and the browser client. Scripts may be loaded by
// pages of any origin; what they may do is for --allow-origins.
func (g *Gateway) assets(get func(string, gin.HandlerFunc)) {
	entries, err := fs.ReadDir(g.cfg.Assets, ".")
	if err != nil {
		panic(err) // they are part of the program
	}
	for _, e := range entries {
		a := newAsset(g.cfg.Assets, e.Name())
		serve := func(c *gin.Context) {
			if h := c.Writer.Header(); h.Get("Access-Control-Allow-Origin") == "" {
				h.Set("Access-Control-Allow-Origin", "*")
			}
			a.serve(c, http.StatusOK)
		}
		switch e.Name() {
		case "index.html":
			get("/", serve)
		case "dashboard.html":
			g.dashboard(a, get)
		default:
			get("/-/"+e.Name(), serve)
		}
	}
}
