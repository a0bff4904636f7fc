package rpc

var (
	ParseUpdates = parseUpdates
	ParseHold    = parseHold
	DigestOf     = digestOf
)
