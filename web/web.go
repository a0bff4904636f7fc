// Package web holds what the gateway serves to browsers: the client and the demo page.
package web

import "embed"

// Files are index.html, served at /, and the others, served under /-/.
//
//go:embed headcount.js index.html demo.js demo.css icon.svg
var Files embed.FS
