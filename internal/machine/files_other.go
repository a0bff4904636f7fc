//go:build !unix || portable

package machine

// OpenFiles returns how many files and sockets this process may have open. ok is false
// if the system has no such limit, or does not report it.
func OpenFiles() (limit uint64, ok bool) { return 0, false }
