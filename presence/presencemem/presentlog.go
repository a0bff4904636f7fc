package presencemem

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync"
	"time"

	"headcount/presence"
)

// The log of present users has what changed since their file was written. A change is in the log before it is answered,
// so a killed process has forgotten nothing that it said: a hold that was ended does not come back, and one that was
// taken is kept. The log is not synced either: what was written survives the process, and a power failure takes longer
// than a presence timeout. So a change costs one write to the system's memory, however many changes gather in it.
//
// A record is the length of its body (4), the checksum of the body (4) and the body. Each change in it has the state of
// members, not differences: changes that the file has already may be repeated, as long as all later ones follow.
const (
	presentLogFile = "present.log"
	recordSize     = 8 // bytes of a record without its body
)

// presentLog is the log of present users. mu is taken before Store.mu, and held while a change is made and logged, so
// that the log has the changes in their order.
type presentLog struct {
	mu   sync.Mutex
	file *os.File // nil: nothing is logged, because there is no file of present users
	// next has the records since the writing of the next file of present users began. The log that continues that file
	// begins with them.
	next    []byte
	writing bool // the next file of present users is being written
}

// logChangesLocked appends changes to the log. If that fails, it removes the file of present users: recalling no users
// is better than recalling users that have left. It needs log.mu.
func (s *Store) logChangesLocked(changes []presence.Change) {
	if s.log.file == nil {
		return
	}

	record := appendRecord(nil, changes)
	if record == nil {
		return
	}

	// The next file may have been read before this change, so its log has it, too.
	if s.log.writing {
		s.log.next = append(s.log.next, record...)
	}

	if _, err := s.log.file.Write(record); err != nil {
		s.cfg.Log.Debug().Err(err).
			Msg("a change of present users cannot be logged; their file is removed until it can be written again")
		s.log.close()
		removePresent(s.dir)

		s.mu.Lock()
		// So that the next round writes a file, and begins a log with it.
		s.membersChanged = true
		s.mu.Unlock()
	}
}

// removePresent removes the file and its log, as well as possible.
func removePresent(dir string) {
	for _, name := range []string{presentFile, presentLogFile} {
		_ = os.Remove(filepath.Join(dir, name))
	}
}

func (l *presentLog) close() {
	if l.file != nil {
		_ = l.file.Close() // nothing waits for it
		l.file = nil
	}
}

// begin says that the next file of present users is being written.
func (l *presentLog) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.next = nil
	l.writing = true
}

// end replaces the log by one that continues the file of present users that was just written, unless that failed.
// Between the two replacements the old log continues the new file as well: it has all later changes.
func (l *presentLog) end(dir string, failure error) error {
	l.mu.Lock()
	defer l.mu.Unlock()

	// What changed while the file was written, which may or may not be in it.
	next := l.next

	l.next = nil
	l.writing = false
	if failure == nil {
		failure = l.replaceLocked(dir, next)
	}

	if failure != nil && l.file == nil {
		removePresent(dir) // the file has no log that continues it any more
	}
	return failure
}

// replaceLocked replaces the log by one that begins with records.
func (l *presentLog) replaceLocked(dir string, records []byte) error {
	path := filepath.Join(dir, presentLogFile)
	file, err := os.OpenFile(path+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)

	if err != nil {
		return err
	}
	// Under another name first: a log without these records would undo them.
	_, err = file.Write(records)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		_ = file.Close()
		return err
	}

	// Only now: until the rename the old log takes the changes.
	l.close()
	l.file = file
	return nil
}

// appendRecord appends a record of the changes of members and of departures, or nothing if there are none.
func appendRecord(b []byte, changes []presence.Change) []byte {
	start := len(b)
	for _, c := range changes {
		changed := c.Reset || len(c.Members) > 0 || len(c.Departures) > 0
		if !changed {
			continue
		}
		if len(b) == start {
			b = append(b, make([]byte, recordSize)...)
		}

		b = appendChange(b, c)
	}
	if len(b) == start {
		return b
	}

	// Only now is its length known, for which room was left before.
	body := b[start+recordSize:]
	binary.BigEndian.PutUint32(b[start:], uint32(len(body)))
	binary.BigEndian.PutUint32(b[start+4:], crc32.ChecksumIEEE(body))
	return b
}

// appendChange appends a change: the partition; 1 if all its members were dropped first; the number of members and of
// each the user, 1 if it is gone, the hold, and the page; the number of departures, and of each the user and when.
func appendChange(b []byte, c presence.Change) []byte {
	b = binary.AppendUvarint(b, uint64(c.Partition))
	b = append(b, flag(c.Reset))

	b = binary.AppendUvarint(b, uint64(len(c.Members)))
	for _, m := range c.Members {
		b = binary.BigEndian.AppendUint64(b, uint64(m.User))
		b = append(b, flag(m.Gone))
		b = binary.AppendVarint(b, holdOf(m))
		b = binary.AppendUvarint(b, uint64(len(m.Page)))
		b = append(b, m.Page...)
	}

	b = binary.AppendUvarint(b, uint64(len(c.Departures)))
	for _, d := range c.Departures {
		b = binary.BigEndian.AppendUint64(b, uint64(d.User))
		b = binary.AppendVarint(b, d.At.Unix())
	}
	return b
}

func flag(is bool) byte {
	if is {
		return 1
	}
	return 0
}

// readRecords parses a log up to the first torn record, whose change was not acknowledged.
func readRecords(b []byte) (changes []presence.Change) {
	for len(b) >= recordSize {
		size := binary.BigEndian.Uint32(b)
		sum := binary.BigEndian.Uint32(b[4:])
		b = b[recordSize:]
		// The process was killed while it wrote this record, so nobody was answered.
		if uint64(size) > uint64(len(b)) || crc32.ChecksumIEEE(b[:size]) != sum {
			return changes
		}

		for r := bytes.NewReader(b[:size]); r.Len() > 0; {
			c, err := readChange(r)
			if err != nil {
				return changes
			}
			changes = append(changes, c)
		}
		b = b[size:]
	}
	return changes
}

// readChange parses what appendChange wrote.
func readChange(r *bytes.Reader) (c presence.Change, err error) {
	f := fields{r: r}
	c.Partition = int(f.number(1 << 31))
	c.Reset = f.byte() != 0

	for n := f.number(r.Len() / minMember); n > 0; n-- {
		m := presence.MemberChange{Member: presence.Member{User: f.user()}}
		m.Gone = f.byte() != 0
		if hold := f.varint(); hold != 0 {
			m.Hold = time.UnixMilli(max(hold, -hold))
			m.Alone = hold < 0
		}
		m.Page = f.text()
		if presence.CheckName(m.Page) != nil {
			f.torn = true
		}
		c.Members = append(c.Members, m)
	}

	for n := f.number(r.Len() / minDeparture); n > 0; n-- {
		user := f.user()
		c.Departures = append(c.Departures, presence.Departure{User: user, At: time.Unix(f.varint(), 0)})
	}

	if f.torn {
		return c, errTorn
	}
	return c, nil
}

// minDeparture is the fewest bytes of a departure: a user and a time.
const minDeparture = 8 + 1

// fields reads fields. After a missing field, the record counts as torn, and all reads return zero.
type fields struct {
	r    *bytes.Reader
	torn bool
}

func (f *fields) note(err error) { f.torn = f.torn || err != nil }

// number reads a number that is not greater than most.
func (f *fields) number(most int) uint64 {
	n, err := binary.ReadUvarint(f.r)
	f.note(err)
	// The number may be a length, by which memory is allocated.
	if n > uint64(most) {
		f.torn = true
	}

	if f.torn {
		return 0
	}
	return n
}

func (f *fields) varint() int64 {
	n, err := binary.ReadVarint(f.r)
	f.note(err)
	return n
}

func (f *fields) byte() byte {
	b, err := f.r.ReadByte()
	f.note(err)
	return b
}

func (f *fields) user() presence.User {
	var b [8]byte
	if n, _ := f.r.Read(b[:]); n != len(b) {
		f.torn = true
	}
	return presence.User(binary.BigEndian.Uint64(b[:]))
}

func (f *fields) text() string {
	b := make([]byte, f.number(f.r.Len()))
	_, _ = f.r.Read(b) // cannot fail: number checked the size
	return string(b)
}
