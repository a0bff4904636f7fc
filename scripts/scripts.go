// Package scripts holds the Lua that changes Redis. Each file's head says what
// it is given, what it returns, and why it may run twice.
package scripts

import "embed"

//go:embed *.lua
var files embed.FS

// Source is the text of the script of that name, "claim" for claim.lua. It
// panics when there is none: the names are constants of the program.
func Source(name string) string {
	text, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic(err)
	}
	return string(text)
}
