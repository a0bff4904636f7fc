package presencemem

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/unread"
)

// TestCrashes interrupts the store at every step of a transaction: before, during and after its writes. bbolt writes
// into pages that the previous transaction does not use, and then one of two head pages. So a file whose writer was
// interrupted has a torn newest head. Whatever the moment, the file has whole operations only: all that were
// acknowledged, and none that were refused.
func TestCrashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		root, err := os.MkdirTemp("", "crash")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(root)
		dir := filepath.Join(root, "data")
		s := New(Config{})
		d, _, err := openDisk(dir, s)
		if err != nil {
			t.Fatal(err)
		}

		// The checks below read what was written, so it need not be on the disk.
		d.db.NoSync = true
		s.unread.disk = d
		defer d.db.Close()

		before := fingerprint(&s.unread)
		page := rapid.SampledFrom([]string{"p", "q", "r"})
		user := rapid.Custom(func(t *rapid.T) unread.User { return unread.User{rapid.Byte().Draw(t, "user") % 4} })

		operation := rapid.Custom(func(t *rapid.T) func(*transaction) error {
			p, u := page.Draw(t, "page"), user.Draw(t, "user")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0: // follow or unfollow
				return func(d *transaction) error {
					old := unread.Record{}
					if r := s.unread.records[u]; r != nil {
						old = *r
					}

					r := old.Clone()
					if i, found := r.Find(p); found {
						r.Follows = append(r.Follows[:i:i], r.Follows[i+1:]...)
					} else {
						r.Follows = append(r.Follows[:i:i], append([]unread.Follow{{Page: p}}, r.Follows[i:]...)...)
					}
					_, err := d.save(u, old, r)
					return err
				}
			case 1:
				return func(d *transaction) error {
					d.change(p, unread.Change{By: &u})
					return nil
				}
			default:
				key := fmt.Sprint(rapid.IntRange(0, 20).Draw(t, "key"))
				return func(d *transaction) error {
					d.change(p, unread.Change{Key: key, By: &u})
					return nil
				}
			}
		})

		for range rapid.IntRange(1, 8).Draw(t, "transactions") {
			var ops []*op
			for range rapid.IntRange(1, 6).Draw(t, "operations") {
				ops = append(ops, &op{do: operation.Draw(t, "operation"), done: make(chan struct{})})
			}

			refused := rapid.IntRange(0, 3).Draw(t, "refused") == 0
			mend := func() {}
			if refused {
				mend = breakFile(t, dir)
			}

			// The file can be torn only where a transaction has written to it.
			stats := d.db.Stats()
			s.commit(ops)
			mend()
			now := d.db.Stats()
			wrote := now.TxStats.GetWrite() > stats.TxStats.GetWrite()

			after := fingerprint(&s.unread)
			file, err := os.ReadFile(filepath.Join(dir, dataFile))
			if err != nil {
				t.Fatal(err)
			}

			// However the transaction ended, the file has what memory has.
			if got := recovered(t, root, file); got != after {
				t.Fatalf("after a transaction the file has\n%s\nmemory\n%s", got, after)
			}

			if d.writable() != nil {
				if after != before {
					t.Fatalf("a refused transaction left\n%s\nbefore it\n%s", after, before)
				}
				d.probe()
				if err := d.writable(); err != nil {
					t.Fatal(err)
				}

				file, err = os.ReadFile(filepath.Join(dir, dataFile))
				if err != nil {
					t.Fatal(err)
				}
				if got := recovered(t, root, file); got != before {
					t.Fatalf("after a probe the file has\n%s\nmemory\n%s", got, before)
				}
			} else if wrote {
				// If the writer ends before the new head is whole, the file is as before the transaction.
				if got := recovered(t, root, tear(t, file)); got != before {
					t.Fatalf("a torn transaction has left\n%s\nbefore it\n%s", got, before)
				}
			}
			before = after
		}
	})
}

// tear returns the file without the end of its newest head page.
func tear(t *rapid.T, file []byte) []byte {
	const head, transaction, size = 16, 48, 64 // offset of the head, offset of the transaction in it, and its size
	second := os.Getpagesize()
	newest := 0
	number := func(at int) uint64 { return binary.NativeEndian.Uint64(file[at+head+transaction:]) }
	if number(second) > number(0) {
		newest = second
	}
	torn := bytes.Clone(file)
	copy(torn[newest+head+transaction:newest+head+size], make([]byte, size-transaction))
	return torn
}

// recovered returns what a store finds in a copy of the file.
func recovered(t *rapid.T, root string, file []byte) string {
	dir, err := os.MkdirTemp(root, "copy")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, dataFile), file, 0o600); err != nil {
		t.Fatal(err)
	}

	var log bytes.Buffer
	s := New(Config{Log: zerolog.New(&log)})
	d, _, err := openDisk(dir, s)
	if err != nil {
		t.Fatal(err)
	}

	if log.Len() > 0 {
		t.Fatalf("a crash needed a repair: %s", &log)
	}

	if err := d.db.Close(); err != nil {
		t.Fatal(err)
	}

	return fingerprint(&s.unread)
}

// fingerprint returns, as text, all unread state that a file must have.
func fingerprint(n *unreadState) string {
	var b bytes.Buffer
	levels, owns := map[string]unread.Level{}, map[string]string{}
	for page, p := range n.pages {
		levels[page] = p.level
		owns[page] = fmt.Sprint(p.owns)
	}

	records := map[unread.User]string{}
	for u, r := range n.records {
		if len(r.Follows) == 0 && r.Updated.IsZero() {
			continue // an empty record is not in the file
		}
		records[u] = fmt.Sprintf("%v %v %v", r.Version, r.Updated, r.Follows)
	}

	fmt.Fprintf(&b, "%v\n%v\n%v\n%v", levels, owns, records, n.keys)
	return b.String()
}
