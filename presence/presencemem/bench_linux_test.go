package presencemem_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presencemem"
)

// BenchmarkWrite writes one change, as a single hold does, and 100 changes that have gathered, each without and with a
// data directory. user-ns/op is the processor time of the program, and kernel-ns/op that of the system.
func BenchmarkWrite(b *testing.B) {
	for name, of := range map[string]struct {
		disk  bool
		batch int
	}{"memory": {false, 1}, "data-dir": {true, 1}, "data-dir, 100 at once": {true, 100}} {
		b.Run(name, func(b *testing.B) {
			cfg := presencemem.Config{PresenceTimeout: 7 * time.Second, Log: zerolog.Nop()}
			s := presencemem.New(cfg)
			if of.disk {
				dir := b.TempDir()
				var err error
				s, err = presencemem.Open(dir, cfg)
				if err != nil {
					b.Fatal(err)
				}

				testkit.Eventually(b, "the log of present users is there", func() bool {
					_, err := os.Stat(filepath.Join(dir, "present.log"))
					return err == nil
				})
			}
			defer s.Close()

			claims, err := s.Claim(b.Context(), "n", []int{0}, false)
			if err != nil {
				b.Fatal(err)
			}

			sequence := uint64(0)
			user, kernel := cpu()
			for b.Loop() {
				sequence++
				c := presence.Change{Claim: claims[0], Sequence: sequence}
				c.Members = make([]presence.MemberChange, of.batch)

				// A thousand users come, and then leave again.
				for i := range c.Members {
					user := presence.User(sequence) % 1000
					member := presence.Member{User: user, Page: "blog/a-page", Hold: time.Now()}
					c.Members[i] = presence.MemberChange{Member: member, Gone: sequence/1000%2 == 1}
				}

				c.Counts = []presence.PageUsers{{Page: "blog/a-page", Users: int64(sequence % 1000)}}
				if o := s.Write(b.Context(), []presence.Change{c}); o[0].Err != nil {
					b.Fatal(o[0].Err)
				}
			}

			u, k := cpu()
			b.ReportMetric(float64(u-user)/float64(b.N), "user-ns/op")
			b.ReportMetric(float64(k-kernel)/float64(b.N), "kernel-ns/op")
		})
	}
}

// cpu returns the processor time that the process has used.
func cpu() (user, kernel time.Duration) {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(err)
	}
	return time.Duration(r.Utime.Nano()), time.Duration(r.Stime.Nano())
}
