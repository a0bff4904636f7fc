package servertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
)

// Log keeps what a process writes, in all its runs. Any goroutine may use it, even while the process writes.
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

// Count returns how often a text occurs in the log.
func (l *Log) Count(text string) int { return strings.Count(l.String(), text) }

// Complaint returns an excerpt of the log that shows a fault of the program, or "".
func (l *Log) Complaint() string {
	text := l.String()
	for _, bad := range []string{"DATA RACE", "panic", "fatal error", `"level":"error"`} {
		if i := strings.Index(text, bad); i >= 0 {
			return fmt.Sprintf("%q in the log:\n%.6000s", bad, text[max(0, i-300):])
		}
	}

	return ""
}

// Repeated reports a line of JSON that has a member twice, or returns "". Of two equal members some readers keep the
// first and others the second.
func (l *Log) Repeated() string {
	for line := range strings.Lines(l.String()) {
		if key := repeatedKey(line); key != "" {
			return fmt.Sprintf("%q is twice in %.6000s", key, line)
		}
	}

	return ""
}

func repeatedKey(line string) string {
	// Token by token, because a map would keep only one of two equal members.
	d := json.NewDecoder(strings.NewReader(line))
	// A line in the console format is no JSON.
	begin, err := d.Token()
	if err != nil || begin != json.Delim('{') {
		return ""
	}

	seen := map[json.Token]bool{}
	for d.More() {
		key, err := d.Token()
		if err != nil { // a killed process may leave half a line
			return ""
		}
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return ""
		}

		if seen[key] {
			return fmt.Sprint(key)
		}
		seen[key] = true
	}

	return ""
}
