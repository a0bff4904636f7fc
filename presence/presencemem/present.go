package presencemem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"headcount/presence"
)

// A data directory also keeps the present users of each page, in one file that is replaced
// as a whole. So the counts of a restarted process are right from the start; users who do
// not return are removed after the presence timeout, as at any takeover. presentlog.go has
// what changes until the next file. The file is not
// synced to the disk, because it is used only for a presence timeout, and a checksum detects
// a file torn by a power failure.
const (
	presentFile  = "present"
	presentMagic = "headcount present 1\n"
	// The file is written when a member was added or removed, at most once per presentEvery,
	// and so rarely that writing takes at most 1/presentShare of the time. Otherwise only
	// its modification time is renewed, which says until when the file was right.
	presentEvery = time.Second
	presentShare = 20
	presentHold  = 3 // presence timeouts that a hold lasts at most
)

// keep calls write once a second until Close, and so rarely that it takes at most 1/presentShare of the time. The last
// call is at the end. It logs the first of several failures with broken, and the first success after them with mended.
func (s *Store) keep(write func(began time.Time, closing bool) error, broken, mended string) {
	wait := time.NewTimer(presentEvery)
	defer wait.Stop()

	failing := false
	for {
		closing := false
		select {
		case <-wait.C:
		case <-s.closing:
			// Once more, for what has changed since the last write.
			closing = true
		}

		began := time.Now()
		err := write(began, closing)

		if err != nil && !failing {
			s.cfg.Log.Warn().Err(err).Msg(broken)
		}
		if err == nil && failing {
			s.cfg.Log.Info().Msg(mended)
		}

		failing = err != nil
		if closing {
			return
		}

		// From the end of a write, so that a slow disk is not busy with nothing else.
		wait.Reset(max(presentEvery, presentShare*time.Since(began)))
	}
}

const presentBroken = "present users cannot be written to the data directory; after a restart " +
	"counts would begin at zero"

// keepPresent keeps the file of present users up to date, until Close.
func (s *Store) keepPresent() {
	s.keep(func(began time.Time, _ bool) error { return s.writePresent(began) },
		presentBroken, "present users can be written to the data directory again")
}

// firstPresent writes the first file of present users of this process, so that there is one that the log continues.
func (s *Store) firstPresent() {
	if err := s.writePresent(time.Now()); err != nil {
		s.cfg.Log.Warn().Err(err).Msg(presentBroken)
	}
}

// writePresent replaces the file if a member has changed since it was written, and
// otherwise renews its modification time.
func (s *Store) writePresent(now time.Time) error {
	s.mu.Lock()
	moved := s.membersChanged
	s.mu.Unlock()

	// Renewing the time is enough, and fails if somebody has removed the file.
	if !moved && os.Chtimes(filepath.Join(s.dir, presentFile), now, now) == nil {
		return nil
	}
	return s.replacePresent(s.present(now))
}

// present returns what the next file of present users has. Changes from now on are in the log that continues that file,
// whether or not the file has them.
func (s *Store) present(now time.Time) []byte {
	// Before any member is read: what changes from here on must be in the log as well.
	s.log.begin()

	b := append([]byte(presentMagic), 0, 0, 0, 0)
	b = binary.AppendVarint(b, now.UnixMilli())
	b = binary.AppendUvarint(b, uint64(len(s.partitions)))

	s.mu.Lock()
	s.membersChanged = false // a later change of a member makes the file be written again
	s.mu.Unlock()

	for id := range s.partitions {
		s.mu.Lock() // for one partition at a time, so that joins do not wait for the whole file
		b = appendPresent(b, id, s.partitions[id].members)
		s.mu.Unlock()
	}

	binary.BigEndian.PutUint32(b[len(presentMagic):], crc32.ChecksumIEEE(b[len(presentMagic)+4:]))

	return b
}

// replacePresent replaces the file and then its log.
func (s *Store) replacePresent(b []byte) error {
	path := filepath.Join(s.dir, presentFile)
	// The log so far ends with the file, and the data directory may lack departures that are in it. If they cannot be
	// written, or not in time, the file is replaced all the same: who is present matters more.
	_ = s.writeSeen(time.Now().Add(seenFlush))

	// A rename replaces the file as a whole, so a process that is killed leaves the old one or the new one.
	err := os.WriteFile(path+".new", b, 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	err = s.log.end(s.dir, err)
	if err == nil {
		return nil
	}

	s.mu.Lock()
	// present has cleared it, and the file was not replaced.
	s.membersChanged = true
	s.mu.Unlock()
	return err
}

// appendPresent appends a partition: its number, the number of its members, and these.
func appendPresent(b []byte, id int, members map[member]int64) []byte {
	b = binary.AppendUvarint(b, uint64(id))
	b = binary.AppendUvarint(b, uint64(len(members)))

	for m, hold := range members {
		b = binary.BigEndian.AppendUint64(b, uint64(m.user))
		b = binary.AppendVarint(b, hold)
		b = binary.AppendUvarint(b, uint64(len(m.page)))
		b = append(b, m.page...)
	}

	return b
}

// Recalled reports whether the store began with all users who were present before the
// restart.
func (s *Store) Recalled() bool { return s.recalled }

// loadPresent fills the partitions from the file, if it is so recent that its users may
// still be present. Holds last until their own end. alive is the time up to which the file was kept right; zero:
// there is no usable file.
func (s *Store) loadPresent(now time.Time) (alive time.Time) {
	s.membersChanged = true // the file is of an earlier process: replace it instead of renewing its time
	path := filepath.Join(s.dir, presentFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return alive
	}

	var partitions []map[member]int64
	var written time.Time
	if err == nil {
		written, partitions, err = parsePresent(b)
	}

	logPath := filepath.Join(s.dir, presentLogFile)
	// The time in the file is that of its beginning. Renewals and the log show that the process lived longer.
	for _, name := range []string{path, logPath} {
		if is, err := os.Stat(name); err == nil && is.ModTime().After(written) {
			written = is.ModTime()
		}
	}

	if err == nil && len(partitions) != len(s.partitions) {
		err = fmt.Errorf("the file has %d partitions, but there are %d", len(partitions), len(s.partitions))
	}
	if err == nil {
		err = s.replayPresent(logPath, partitions)
	}

	if err != nil {
		s.cfg.Log.Warn().Err(err).Msg("present users cannot be read from the data directory; counts begin at zero")
		return alive
	}

	return s.recall(partitions, written, now)
}

// recall makes those members of a file present that may still be, and returns when the file was right, but no time in
// the future. Only holds survive if the process was away for longer than the presence timeout.
func (s *Store) recall(partitions []map[member]int64, written, now time.Time) (alive time.Time) {
	// After the clock was set back, the file seems to come from the future, and holds seem to last longer than any hold
	// can.
	recent := now.Sub(written).Abs() <= s.cfg.PresenceTimeout
	s.recalled = recent
	latest := now.Add(presentHold * s.cfg.PresenceTimeout).UnixMilli()
	if written.After(now) {
		written = now
	}

	for id, members := range partitions {
		for m, hold := range members {
			end := max(hold, -hold)
			lasts := end > now.UnixMilli() && end <= latest
			if recent || lasts {
				s.partitions[id].members[m] = max(-latest, min(hold, latest))
			} else {
				s.seen.departed(m.user, written)
			}
		}
	}

	return written
}

// replayPresent makes the changes in the log.
func (s *Store) replayPresent(path string, partitions []map[member]int64) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // the file is of a release without a log
		return nil
	}
	if err != nil {
		return err
	}

	for _, c := range readRecords(b) {
		if c.Partition >= len(partitions) {
			return errTorn
		}
		changeMembers(partitions[c.Partition], c)
		for _, d := range c.Departures {
			s.seen.replay(d)
		}
	}
	return nil
}

var errTorn = errors.New("the file is torn or damaged")

// parsePresent parses what writePresent wrote.
func parsePresent(b []byte) (written time.Time, partitions []map[member]int64, err error) {
	b, ok := bytes.CutPrefix(b, []byte(presentMagic))
	if !ok || len(b) < 4 || binary.BigEndian.Uint32(b) != crc32.ChecksumIEEE(b[4:]) {
		return written, nil, errTorn
	}

	r := bytes.NewReader(b[4:])
	millis, err := binary.ReadVarint(r)
	if err != nil {
		return written, nil, errTorn
	}

	count, err := binary.ReadUvarint(r)
	if err != nil || count > uint64(r.Len()) { // a partition takes at least two bytes
		return written, nil, errTorn
	}

	partitions = make([]map[member]int64, count)
	for range partitions {
		id, err := binary.ReadUvarint(r)
		// Each partition is there once: with as many entries as partitions, none is missing then.
		if err != nil || id >= count || partitions[id] != nil {
			return written, nil, errTorn
		}
		partitions[id], err = readPresent(r)
		if err != nil {
			return written, nil, err
		}
	}
	if r.Len() != 0 {
		return written, nil, errTorn
	}
	return time.UnixMilli(millis), partitions, nil
}

// minMember is the fewest bytes of a member: a user, a hold, a length and a page.
const minMember = 8 + 1 + 1 + 1

// readPresent reads the members of a partition.
func readPresent(r *bytes.Reader) (map[member]int64, error) {
	n, err := binary.ReadUvarint(r)
	// Before anything is allocated, because the number may be torn.
	if err != nil || n > uint64(r.Len())/minMember {
		return nil, errTorn
	}

	members := make(map[member]int64, n)
	for range n {
		var user [8]byte
		if k, _ := r.Read(user[:]); k != len(user) {
			return nil, errTorn
		}

		hold, err := binary.ReadVarint(r)
		if err != nil {
			return nil, errTorn
		}

		size, err := binary.ReadUvarint(r)
		if err != nil || size > uint64(r.Len()) {
			return nil, errTorn
		}

		page := make([]byte, size)
		_, _ = r.Read(page) // cannot fail: size was checked
		if presence.CheckName(string(page)) != nil {
			return nil, errTorn
		}

		members[member{presence.User(binary.BigEndian.Uint64(user[:])), string(page)}] = hold
	}

	return members, nil
}
