// Package scripts has the Lua scripts that read and change Redis. The head of each file documents its keys, arguments
// and results, and why it may run twice.
package scripts

import (
	"embed"
	"strings"
)

// Name is the name of a script: its file without ".lua".
type Name string

// The names of all scripts.
const (
	Change   Name = "change"
	Claim    Name = "claim"
	Counts   Name = "counts"
	Days     Name = "days"
	Detach   Name = "detach"
	Fence    Name = "fence"
	Hello    Name = "hello"
	Leave    Name = "leave"
	Load     Name = "load"
	Log      Name = "log"
	Members  Name = "members"
	Merge    Name = "merge"
	Minutes  Name = "minutes"
	Own      Name = "own"
	Peers    Name = "peers"
	Read     Name = "read"
	Relog    Name = "relog"
	Remember Name = "remember"
	Renew    Name = "renew"
	Resize   Name = "resize"
	Save     Name = "save"
	Sweep    Name = "sweep"
	Values   Name = "values"

	HookAcknowledge Name = "hook_acknowledge"
	HookTake        Name = "hook_take"
	HookReport      Name = "hook_report"
	HookReported    Name = "hook_reported"

	RowsClaim  Name = "rows_claim"
	RowsCommit Name = "rows_commit"
)

// Rows are the scripts of rows.
var Rows = []Name{RowsClaim, RowsCommit}

// Webhooks are the scripts of webhooks.
var Webhooks = []Name{HookAcknowledge, HookTake, HookReport, HookReported}

// Presence are the scripts of presence, in the order of the alphabet.
var Presence = []Name{
	Change, Claim, Counts, Days, Detach, Fence, Hello, Leave, Load, Log, Members, Merge, Minutes, Own, Peers, Read,
	Relog, Remember, Renew, Resize, Save, Sweep, Values,
}

// Marked are the scripts whose changes are acknowledged to users, and the one that every process runs regularly. Mark
// precedes them, so that the process notices when Redis loses what it acknowledged (mark.lua).
var Marked = []Name{Change, Renew, Save}

//go:embed *.lua
var files embed.FS

// include begins a line that Source replaces by the named file. Included files include no others.
const include = "--#include "

// Source returns the text of a script, with its includes.
func (n Name) Source() string {
	var text strings.Builder
	for line := range strings.Lines(read(string(n) + ".lua")) {
		if file, is := strings.CutPrefix(line, include); is {
			line = read(strings.TrimSpace(file))
		}
		text.WriteString(line)
	}
	return text.String()
}

// Mark returns the text that precedes a marked script.
func Mark() string { return read("mark.lua") }

// read panics if the file does not exist: all names are constants.
func read(name string) string {
	text, err := files.ReadFile(name)
	if err != nil {
		panic(err)
	}
	return string(text)
}
