//go:build !unix

package simulate

// enoughFiles has no limit to look at here.
func enoughFiles(int) error { return nil }
