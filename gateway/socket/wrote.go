//go:build promises

package socket

// wrote tells the owner what a client is sent, before compression and encryption. The caller holds mu.
func (w *Wire) wrote(p []byte) {
	if o, ok := w.owner.(interface{ Wrote(p []byte) }); ok {
		o.Wrote(p)
	}
}
