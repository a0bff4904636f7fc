package servertest

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
)

// Log keeps what a process writes, over all its lives. It may be read meanwhile. Any
// goroutine may use it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Complaint returns what the log has that must never be there, or "".
func (l *Log) Complaint() string {
	text := l.String()
	for _, bad := range []string{"DATA RACE", "panic", "fatal error", `"level":"error"`} {
		if i := strings.Index(text, bad); i >= 0 {
			return fmt.Sprintf("%q in the log:\n%.6000s", bad, text[max(0, i-300):])
		}
	}
	return ""
}
