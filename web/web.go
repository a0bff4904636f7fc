// Package web holds what the gateway serves to browsers: the client, the demo
// page and the dashboard. The client's sources are the scripts beside this
// file; what is served of them, public/headcount.js and its parts, is made by
// `npm run build`, and a test proves that it is what the sources give.
package web

import (
	"embed"
	"io/fs"
)

//go:embed public
var public embed.FS

// Files are index.html, served at /, and the others, served under /-/.
var Files = files()

func files() fs.FS {
	sub, err := fs.Sub(public, "public")
	if err != nil {
		panic(err) // the folder is part of the program
	}
	return sub
}
