package rowsredis_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/testkit"
)

// TestServerContents: Contents lists the rows and IDs of all partitions, at whichever masters they are, without the
// keys of inboxes.
func TestServerContents(t *testing.T) {
	for name, server := range map[string]interface {
		URL() string
		Flush(t testing.TB)
	}{
		"a server":  redistest.Single(t),
		"a Cluster": redistest.ThreeMasters(t),
	} {
		t.Log(name)
		server.Flush(t) // other tests have left keys
		hasContents(t, server.URL())
	}
}

func hasContents(t *testing.T, url string) {
	s := open(t, url)
	inbox := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, url), Inbox: "eu"})
	t.Cleanup(inbox.Close)
	until := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	fill(t, s, until)
	fill(t, inbox, until.Add(time.Hour))

	seen := map[string]bool{}
	err := s.Contents(t.Context(), func(partition int, collections []string, ids []rows.ID) error {
		for _, of := range collections {
			seen[fmt.Sprint(partition, of)] = true
		}

		for _, id := range ids {
			if !id.Until.Equal(until) {
				t.Errorf("an ID of partition %d is remembered until %s, want another time", partition, id.Until)
			}

			seen[fmt.Sprint(partition, id.Bytes)] = true
		}

		return nil
	})

	if err != nil {
		t.Fatal(err)
	}

	var missing []int
	for p := range rows.Partitions {
		if !seen[fmt.Sprint(p, "c")] || !seen[fmt.Sprint(p, "d:1")] || !seen[fmt.Sprint(p, idOf(p))] {
			missing = append(missing, p)
		}
	}

	if len(missing) > 0 || len(seen) != 3*rows.Partitions {
		t.Errorf("%d of %d names were listed; incomplete are %v", len(seen), 3*rows.Partitions, missing)
	}

	enough := errors.New("enough")
	calls := 0
	err = s.Contents(t.Context(), func(int, []string, []rows.ID) error {
		calls++
		return enough
	})

	if !errors.Is(err, enough) || calls != 1 {
		t.Errorf("the list ends with %v after %d calls, want the error of the first call", err, calls)
	}
}

// TestServerContentsOfTwoRunsAreNoList: if the server restarts during a list, keys may be missing, so the list fails.
// The next list is complete.
func TestServerContentsOfTwoRunsAreNoList(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	s := open(t, server.URL())
	o := own(t, s, 0)

	const collections = 3000 // several pages of keys
	commit := o.next()
	for n := range collections {
		name := rows.Name{Collection: fmt.Sprint("of ", n), Field: "x"}
		commit.Rows = append(commit.Rows, rows.Row{Name: name, Value: []byte("v")})
	}
	o.insist(commit)

	restart := server.Restart
	seen := map[string]bool{}
	list := func() error {
		return s.Contents(t.Context(), func(_ int, names []string, _ []rows.ID) error {
			for _, name := range names {
				seen[name] = true
			}
			restart(t)
			restart = func(testing.TB) {}

			return nil
		})
	}

	if err := list(); !errors.Is(err, rows.ErrUnavailable) {
		t.Errorf("a list over a restart returns %v, with %d of %d collections; want ErrUnavailable",
			err, len(seen), collections)
	}
	testkit.Eventually(t, "a list of all collections", func() bool { return list() == nil && len(seen) == collections })
}

func idOf(partition int) [16]byte { return [16]byte{0: 'i', 15: byte(partition)} }

// fill writes rows of two collections and an ID to each partition.
func fill(t testing.TB, s rows.Store, until time.Time) {
	t.Helper()
	o := ownAll(t, s)
	commits := make([]rows.Commit, rows.Partitions)
	for p, is := range o.claims {
		commits[p] = rows.Commit{
			Partition: p, Epoch: is.Epoch, After: is.Number, Number: is.Number + 1, At: time.Now(),
			IDs: []rows.ID{{Bytes: idOf(p), Until: until}},
			Rows: []rows.Row{
				{Name: rows.Name{Collection: "c", Field: "x"}, Value: []byte("v")},
				{Name: rows.Name{Collection: "d:1", Field: "y"}, Value: []byte("v")},
			},
		}
	}

	if errs := s.Commit(t.Context(), commits); slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		t.Fatal(errors.Join(errs...))
	}
}
