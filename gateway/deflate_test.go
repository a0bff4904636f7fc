package gateway

import (
	"bytes"
	"compress/flate"
	"io"
	"runtime"
	"testing"
	"time"

	"headcount/presence"
)

// BenchmarkDeflate measures what permessage-deflate would cost for counts, and what it
// would save: with a window for every connection, and without windows, when one
// compressed frame serves all subscribers. Its figures are why the gateway does not
// offer the extension.
func BenchmarkDeflate(b *testing.B) {
	var texts [][]byte
	for i := range uint64(64) {
		texts = append(texts, appendCountText(nil, presence.Count{
			Page: "/2030/10/a-page-with-a-usual-name", Users: int64(700 + i*7%40), Updated: time.Unix(1_900_000_000+int64(i), 0),
			Version: presence.Version{Incarnation: 1_900_000_000_000, Sequence: 4000 + i},
		}))
	}
	b.Run("a window each", func(b *testing.B) {
		const connections = 100
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		writers := make([]*flate.Writer, connections)
		for i := range writers {
			writers[i], _ = flate.NewWriter(io.Discard, flate.BestSpeed) // the level is one
			_, _ = writers[i].Write(texts[0])
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		var out bytes.Buffer
		w := writers[0]
		w.Reset(&out)
		n := 0
		for b.Loop() {
			_, _ = w.Write(texts[n%len(texts)]) // to memory
			_ = w.Flush()
			n++
			if out.Len() > 1<<20 {
				b.ReportMetric(float64(out.Len())/float64(n), "B/frame")
				out.Reset()
				n = 0
			}
		}
		if n > 0 {
			b.ReportMetric(float64(out.Len())/float64(n), "B/frame")
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/connections, "B/connection")
		runtime.KeepAlive(writers)
	})
	b.Run("one frame for all", func(b *testing.B) {
		var out bytes.Buffer
		w, err := flate.NewWriter(&out, flate.BestSpeed)
		if err != nil {
			b.Fatal(err)
		}
		sizes, n := 0, 0
		for b.Loop() {
			out.Reset()
			w.Reset(&out)
			_, _ = w.Write(texts[n%len(texts)])
			_ = w.Flush()
			sizes += out.Len() - 4 // without the end that the extension leaves out
			n++
		}
		b.ReportMetric(float64(sizes)/float64(n), "B/frame")
		b.ReportMetric(float64(len(texts[0])), "B/plain")
	})
}
