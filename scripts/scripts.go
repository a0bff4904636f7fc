// Package scripts holds the Lua that changes Redis. Each file's head says what
// it is given, what it returns, and why it may run twice.
package scripts

import (
	"embed"
	"strings"
)

//go:embed *.lua
var files embed.FS

const include = "--#include pairs.lua\n"

// Source is the text of the script of that name, "claim" for claim.lua. It
// panics when there is none: the names are constants of the program.
func Source(name string) string {
	text := read(name)
	if strings.Contains(text, include) {
		return strings.Replace(text, include, read("pairs"), 1)
	}
	return text
}

func read(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err)
	}
	return string(text)
}
