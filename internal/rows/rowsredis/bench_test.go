package rowsredis_test

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"testing"
	"time"

	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/rows"
)

// BenchmarkCommit makes commits like an owner of counters: the row of each changed counter, a row for the gateway that
// made the call, an ID for each partition of a batch, and a publication. It reports how much processor time of Redis a
// change takes.
func BenchmarkCommit(b *testing.B) {
	for _, size := range []struct{ partitions, changes int }{{1, 1}, {64, 64}, {64, 1000}} {
		b.Run(fmt.Sprintf("%d changes of %d partitions", size.changes, size.partitions), func(b *testing.B) {
			server := redistest.Single(b)
			o := ownAll(b, open(b, server.URL()))

			before := busy(b, server)
			for n := 0; b.Loop(); n++ {
				commits := make([]rows.Commit, size.partitions)
				for i := range size.changes {
					o.change(&commits[i%size.partitions], i%size.partitions, i, n)
				}

				if size.changes > size.partitions {
					nameBatch(commits, n)
				}
				for _, err := range o.store.Commit(b.Context(), commits) {
					if err != nil {
						b.Fatal(err)
					}
				}
			}

			used := busy(b, server) - before
			b.ReportMetric(float64(used.Nanoseconds())/float64(b.N*size.changes), "redis-ns/change")
		})
	}
}

// change adds the n-th change of a counter of partition p to a commit.
func (o *ownerOfAll) change(c *rows.Commit, p, counter, n int) {
	is := &o.claims[p]
	if c.Number == 0 {
		*c = rows.Commit{Partition: p, Epoch: is.Epoch, After: is.Number, Number: is.Number + 1, At: time.Now()}
		c.Rows = []rows.Row{{Name: rows.Name{Collection: "streams", Field: "gateway"}, Value: make([]byte, 24)}}
		is.Number++
	}

	head := fmt.Appendf(nil, "a row of %030d", n)
	name := rows.Name{Collection: "heads", Field: "views:" + strconv.Itoa(counter)}
	c.Rows = append(c.Rows, rows.Row{Name: name, Value: head})
	c.Publication = append(append(c.Publication, name.Field...), head...)
}

// nameBatch gives each commit the ID of its part of batch n.
func nameBatch(commits []rows.Commit, n int) {
	for p := range commits {
		id := rows.ID{Until: commits[p].At.Add(24 * time.Hour)}
		binary.BigEndian.PutUint64(id.Bytes[:], uint64(n))
		commits[p].IDs = []rows.ID{id}
	}
}

// busy returns how much processor time the server has used.
func busy(t testing.TB, server *redistest.Server) time.Duration {
	t.Helper()
	info := server.Do(t, "INFO", "cpu").(string)
	var sum float64
	for _, mode := range []string{"user", "sys"} {
		seconds, err := strconv.ParseFloat(redisconn.InfoField(info, "used_cpu_"+mode), 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += seconds
	}

	return time.Duration(sum * float64(time.Second))
}
