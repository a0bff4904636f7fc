package redisstore_test

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/pncounter"
	"headcount/presence/redisstore"
	"headcount/presence/redistest"
	"headcount/presence/unread"
)

// crowd makes the changes of n users who arrive one after the other. It makes them as a
// node would write them: one change per partition, with the site's total.
type crowd struct {
	claims []presence.Claim
	seq    uint64
	next   uint64
	users  []map[string]int64 // by partition: page -> users
}

func newCrowd(b *testing.B, s *redisstore.Store) *crowd {
	c := &crowd{claims: start(b, s).claims, seq: 10}
	for range c.claims {
		c.users = append(c.users, map[string]int64{})
	}
	return c
}

func (c *crowd) come(n int, page func(user uint64) string) []presence.Change {
	c.seq++
	changes := make([]presence.Change, len(c.claims))
	touched := make([]map[string]struct{}, len(c.claims))
	for range n {
		c.next++
		u := presence.User(c.next * 0x9E3779B97F4A7C15)
		p := u.Partition(presence.DefaultPartitions)
		name := page(c.next)
		changes[p].Members = append(changes[p].Members, presence.MemberChange{Member: presence.Member{User: u, Page: name}})
		if touched[p] == nil {
			touched[p] = map[string]struct{}{}
		}
		for _, name := range []string{name, presence.Site} {
			c.users[p][name]++
			touched[p][name] = struct{}{}
		}
	}
	out := changes[:0]
	for p, ch := range changes {
		if ch.Members == nil {
			continue
		}
		ch.Claim, ch.Sequence = c.claims[p], c.seq
		for name := range touched[p] {
			ch.Counts = append(ch.Counts, presence.PageUsers{Page: name, Users: c.users[p][name]})
		}
		out = append(out, ch)
	}
	return out
}

func write(b *testing.B, s *redisstore.Store, changes []presence.Change) {
	b.Helper()
	for _, o := range s.Write(b.Context(), changes) {
		if o.Err != nil {
			b.Fatal(o.Err)
		}
	}
}

func onPages(n uint64) func(uint64) string {
	return func(u uint64) string { return "/shop/item/" + strconv.FormatUint(u*2654435761%n, 10) }
}

// warm is how many times 5,000 users are there before joins are measured.
const warm = 10

func BenchmarkJoins(b *testing.B) {
	for _, bc := range []struct {
		pages uint64
		batch int
	}{{1, 1}, {1, 2000}, {100, 2000}, {10_000, 2000}} {
		b.Run(fmt.Sprintf("pages=%d/batch=%d", bc.pages, bc.batch), func(b *testing.B) {
			server := redistest.Start(b)
			s := open(b, server.URL())
			c := newCrowd(b, s)
			for range warm { // a bucket, a page and a partition are more than one user
				write(b, s, c.come(5000, onPages(bc.pages)))
			}
			joins, took := 0, time.Duration(0)
			_, before := cpuOf(b, server)
			for b.Loop() {
				changes := c.come(bc.batch, onPages(bc.pages))
				start := time.Now()
				write(b, s, changes)
				took += time.Since(start)
				joins += bc.batch
			}
			_, after := cpuOf(b, server)
			b.ReportMetric(float64(joins)/took.Seconds(), "joins/s")
			b.ReportMetric((after-before)*1e6/float64(joins), "redis-us/join")
		})
	}
}

// Five thousand users come to one page at once.
func BenchmarkArrival(b *testing.B) {
	server := redistest.Single(b)
	s := open(b, server.URL())
	c := newCrowd(b, s)
	before := stat(b, server, "stats", "total_commands_processed")
	for b.Loop() {
		write(b, s, c.come(5000, onPages(1)))
	}
	b.ReportMetric(float64(stat(b, server, "stats", "total_commands_processed")-before)/float64(b.N), "commands/op")
}

func stat(b *testing.B, server *redistest.Server, section, name string) int {
	b.Helper()
	for line := range strings.Lines(server.Do(b, "INFO", section).(string)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), name+":"); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				b.Fatal(err)
			}
			return n
		}
	}
	b.Fatalf("INFO %s has no %s", section, name)
	return 0
}

// BenchmarkMemory fills Redis once, whatever b.N.
func BenchmarkMemory(b *testing.B) {
	for _, users := range []int{10_000, 200_000, 1_000_000} {
		for _, pages := range []uint64{100, 10_000} {
			b.Run(fmt.Sprintf("users=%d/pages=%d", users, pages), func(b *testing.B) {
				server := redistest.Start(b)
				empty := stat(b, server, "memory", "used_memory")
				s := open(b, server.URL())
				c := newCrowd(b, s)
				idle := stat(b, server, "memory", "used_memory")
				for n := 0; n < users; n += 5000 {
					write(b, s, c.come(5000, onPages(pages)))
				}
				full := stat(b, server, "memory", "used_memory")
				for b.Loop() {
				}
				b.ReportMetric(float64(idle-empty)/1024, "KiB-empty")
				b.ReportMetric(float64(full-idle)/float64(users), "B/user")
			})
		}
	}
}

func BenchmarkCounts(b *testing.B) {
	s := open(b, redistest.Single(b).URL())
	c := newCrowd(b, s)
	write(b, s, c.come(5000, onPages(100)))
	var pages []string
	for i := range uint64(100) {
		pages = append(pages, onPages(100)(i))
	}
	for _, n := range []int{1, 100} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				counts(b, s, pages[:n]...)
			}
		})
	}
}

// This measures what Redis does while nobody comes or goes: only the poll of the
// generation and the pings of subscriptions.
func BenchmarkRest(b *testing.B) {
	server := redistest.Start(b)
	s := open(b, server.URL())
	newCrowd(b, s)
	before := stat(b, server, "stats", "total_commands_processed")
	const rest = 5 * time.Second
	for range rest / time.Second {
		if _, err := s.Generation(b.Context()); err != nil {
			b.Fatal(err)
		}
		time.Sleep(time.Second)
	}
	after := stat(b, server, "stats", "total_commands_processed")
	for b.Loop() {
	}
	b.ReportMetric(float64(after-before)/rest.Seconds(), "commands/s")
}

// cpuOf is the CPU time that this process has used, and that of the server, in seconds.
func cpuOf(b *testing.B, server *redistest.Server) (client, redis float64) {
	b.Helper()
	var own syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &own); err != nil {
		b.Fatal(err)
	}
	client = float64(own.Utime.Nano()+own.Stime.Nano()) / 1e9
	for line := range strings.Lines(server.Do(b, "INFO", "cpu").(string)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_sys" || name == "used_cpu_user" {
			n, _ := strconv.ParseFloat(value, 64)
			redis += n
		}
	}
	return client, redis
}

// reportCPU reports the CPU time used since then, per million pages.
func reportCPU(b *testing.B, server *redistest.Server, client, redis float64, pages int) {
	b.Helper()
	c, r := cpuOf(b, server)
	b.ReportMetric((c-client)/float64(pages)*1e6, "CPUs/Mpages")
	b.ReportMetric((r-redis)/float64(pages)*1e6, "redis-CPUs/Mpages")
	b.ReportMetric(float64(pages)/b.Elapsed().Seconds(), "pages/s")
}

// BenchmarkOutgoing is what it costs a region to read 100,000 changed pages for
// one peer, as BenchmarkMerge is what it costs the peer to take them.
func BenchmarkOutgoing(b *testing.B) {
	server := redistest.Start(b)
	w := newWorld(b, server.URL(), "us", "eu")
	const pages = 100_000
	w.fill(pages, 1)
	client, redis := cpuOf(b, server)
	b.ResetTimer()
	for range b.N {
		positions := make([]pncounter.Position, presence.DefaultBuckets)
		for i := range positions {
			positions[i].Bucket = i
		}
		read := 0
		for len(positions) > 0 {
			batches, err := w.Outgoing(b.Context(), positions, 500)
			if err != nil {
				b.Fatal(err)
			}
			positions = positions[:0]
			for _, batch := range batches {
				read += len(batch.Pages)
				if batch.More {
					positions = append(positions, pncounter.Position{Bucket: batch.Bucket, Log: batch.Log, Cursor: batch.To})
				}
			}
		}
		if read != pages {
			b.Fatalf("%d pages, want %d", read, pages)
		}
	}
	reportCPU(b, server, client, redis, pages*b.N)
}

// BenchmarkMerge measures what changed pages of one region cost the Redis of another
// region and this process: pages a second, and CPU seconds per million pages of both.
func BenchmarkMerge(b *testing.B) {
	server := redistest.Start(b)
	w := newWorld(b, server.URL(), "eu", "us")
	peer := redisstore.NewPeer(w.Store, "us", "eu")
	const pages = 100_000
	buckets := map[int][]pncounter.PagePair{}
	for i := range pages {
		page := "page/" + strconv.Itoa(i)
		bucket := presence.Bucket(page, presence.DefaultBuckets)
		buckets[bucket] = append(buckets[bucket], pncounter.PagePair{Page: page, Pair: pncounter.Pair{Incarnation: 1_700_000_000_000}})
	}
	cursor := uint64(0)
	round := func() {
		for first := 0; ; first += 500 {
			var batches []pncounter.Batch
			for bucket, all := range buckets {
				if first >= len(all) {
					continue
				}
				part := all[first:min(first+500, len(all))]
				for i := range part {
					part[i].Increments++
				}
				batches = append(batches, pncounter.Batch{Region: "us", Bucket: bucket, Log: 1_700_000_000_000, To: cursor + 1, Complete: true, Pages: part})
			}
			if len(batches) == 0 {
				return
			}
			acks, err := peer.Merge(b.Context(), batches)
			if err != nil {
				b.Fatal(err)
			}
			for i, a := range acks {
				if a.Status != pncounter.Merged || a.Changed != len(batches[i].Pages) {
					b.Fatalf("%+v", a)
				}
			}
			cursor++
		}
	}
	round()
	client, redis := cpuOf(b, server)
	b.ResetTimer()
	for range b.N {
		round()
	}
	reportCPU(b, server, client, redis, pages*b.N)
}

// BenchmarkLevels reads how far 1,000 pages have changed, for one user.
func BenchmarkLevels(b *testing.B) {
	s := open(b, redistest.Single(b).URL())
	pages := make([]string, unread.MaxFollows)
	for i := range pages {
		pages[i] = fmt.Sprint("page ", i)
		if err := s.Change(b.Context(), pages[i], unread.Change{}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if _, _, err := s.Levels(b.Context(), unread.User{1}, pages); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRecord reads the record of a user who follows 1,000 pages.
func BenchmarkRecord(b *testing.B) {
	s := open(b, redistest.Single(b).URL())
	u := unread.User{2}
	var r unread.Record
	for i := range unread.MaxFollows {
		r.Follows = append(r.Follows, unread.Follow{Page: fmt.Sprintf("page %4d", i), Incarnation: 1700000000000})
	}
	if _, err := s.Save(b.Context(), u, unread.Record{}, r); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Records(b.Context(), []unread.User{u}); err != nil {
			b.Fatal(err)
		}
	}
}
