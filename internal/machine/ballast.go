package machine

import "os"

// ballast counts as memory in use, but is never touched, so the system allocates no pages for it.
var ballast []byte

// maxBallast is half of the heap at which the first garbage collection starts.
const maxBallast = 8 << 20

// LoadBallast makes Go collect garbage less often while little memory is in use. Go collects when the heap
// has doubled. The heap of a server with few clients is a few MB, so a busy server would spend a tenth of
// its time on collections. With the ballast the first collection is at 16 MB, or at a 16th of Memory if that
// is less. ReturnMemory returns memory that load has added. If GOGC is set, LoadBallast does nothing.
func LoadBallast() {
	if os.Getenv("GOGC") == "" {
		ballast = make([]byte, min(maxBallast, Memory()/32))
	}
}
