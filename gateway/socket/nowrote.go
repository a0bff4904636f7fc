//go:build !promises

package socket

// wrote is told what a client is sent; see gateway/conn/promises.go.
func (*Wire) wrote([]byte) {}
