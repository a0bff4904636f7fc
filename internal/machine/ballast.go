package machine

import "os"

// ballast counts as memory in use, but nobody touches it, so the system gives no pages for it.
var ballast []byte

// mostBallast is half of what is allocated, at least, from one collection of garbage to the next.
const mostBallast = 8 << 20

// LoadBallast has Go collect garbage less often while little memory is in use. Go collects when the heap has doubled,
// and that of a server with few clients is a few MB: a busy one would spend a tenth of its time on
// collections. So the heap begins at twice the ballast: 16 MB, or a 16th of Memory if that is less. What it
// takes more under load ReturnMemory gives back afterwards. If GOGC is set, LoadBallast does nothing.
func LoadBallast() {
	if os.Getenv("GOGC") == "" {
		ballast = make([]byte, min(mostBallast, Memory()/32))
	}
}
