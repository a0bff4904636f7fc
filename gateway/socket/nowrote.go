//go:build !promises

package socket

// wrote is told what a client is sent; see gateway/promises.go.
func (*Wire) wrote([]byte) {}
