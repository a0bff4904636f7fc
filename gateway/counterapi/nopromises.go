//go:build !promises

package counterapi

import "headcount/counter"

// floors are what promises.go checks answers with, in the programs that tests start.
type floors struct{}

func floorsOf([]counter.Change) floors { return floors{} }
func floorOf(string) floors            { return floors{} }

func (floors) noteChanges([]counter.Change, *counter.Result) {}
func (floors) note(*counter.Counter)                         {}
