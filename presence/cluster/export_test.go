package cluster

var (
	ParseCounts = parseCounts
	ParseHold   = parseHold
	DigestOf    = digestOf
)
