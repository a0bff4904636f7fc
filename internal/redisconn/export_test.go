package redisconn

// RefusedBy is for tests of what a server really says.
var RefusedBy = refusedBy

// IsDenial reports whether a reason is taken for one of a user's rights.
func IsDenial(reason string) bool { return denials.MatchString(reason) }
