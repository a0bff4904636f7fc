// Package scripts holds the Lua that changes Redis. Each file's head says what
// it is given, what it returns, and why it may run twice.
package scripts

import (
	"embed"
	"strings"
)

// Name is the name of a script: its file without ".lua".
type Name string

// The scripts there are.
const (
	Change   Name = "change"
	Claim    Name = "claim"
	Counts   Name = "counts"
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

	CounterApply       Name = "counter_apply"
	CounterBegin       Name = "counter_begin"
	CounterCheckpoint  Name = "counter_checkpoint"
	CounterDimension   Name = "counter_dimension"
	CounterAcknowledge Name = "counter_acknowledge"
	CounterEvict       Name = "counter_evict"
	CounterFreeze      Name = "counter_freeze"
	CounterHistory     Name = "counter_history"
	CounterLedger      Name = "counter_ledger"
	CounterLimit       Name = "counter_limit"
	CounterLog         Name = "counter_log"
	CounterMerge       Name = "counter_merge"
	CounterLoad        Name = "counter_load"
	CounterNote        Name = "counter_note"
	CounterShard       Name = "counter_shard"
	CounterSharded     Name = "counter_sharded"
	CounterRead        Name = "counter_read"
	CounterRestore     Name = "counter_restore"
	CounterStage       Name = "counter_stage"
	CounterStatus      Name = "counter_status"
	CounterDrain       Name = "counter_drain"

	HookDone Name = "hook_done"
	HookTake Name = "hook_take"
	HookTell Name = "hook_tell"
	HookTold Name = "hook_told"
)

// Webhooks are the scripts of webhooks.
var Webhooks = []Name{HookDone, HookTake, HookTell, HookTold}

// Counters are the scripts of counters that last.
var Counters = []Name{
	CounterApply, CounterBegin, CounterCheckpoint, CounterDimension, CounterAcknowledge, CounterEvict, CounterFreeze, CounterHistory, CounterLedger,
	CounterLimit, CounterLoad, CounterLog, CounterMerge, CounterNote, CounterShard, CounterSharded, CounterRead, CounterRestore, CounterStage,
	CounterStatus, CounterDrain,
}

// Presence are the scripts of presence, in the order of the alphabet.
var Presence = []Name{
	Change, Claim, Counts, Detach, Fence, Hello, Leave, Load, Log, Members, Merge, Minutes, Own, Peers, Read, Relog, Remember, Renew, Resize, Save, Sweep, Values,
}

// Marked are the scripts that carry out what users are told of, and the one that each process runs all the
// time: where there is a mark, see mark.lua, Mark comes before them.
var Marked = []Name{Change, CounterApply, CounterShard, Renew, Save}

//go:embed *.lua
var files embed.FS

// include begins a line in whose place the file it names comes. Included files
// include no others.
const include = "--#include "

// Source is the text of a script.
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

// Mark is what comes before a script that is marked.
func Mark() string { return read("mark.lua") }

// read panics when there is no such file: the names are constants of the program.
func read(name string) string {
	text, err := files.ReadFile(name)
	if err != nil {
		panic(err)
	}
	return string(text)
}
