package redisconn

// RefusedBy is exported for tests of the errors of real servers.
var RefusedBy = refusedBy

// IsDenial reports whether a reason counts as a missing right of the user.
func IsDenial(reason string) bool { return denials.MatchString(reason) }
