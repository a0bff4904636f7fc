package heartbeat_test

import (
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
	. "headcount/presence/heartbeat"
	"headcount/presence/seal"
)

const partitions = 271

var from = Source{Gateway: "10.0.0.1:7946", Incarnation: 1700000000000}

func keys(t rapid.TB, secrets ...string) *seal.Keys {
	t.Helper()
	var list [][]byte
	for _, s := range secrets {
		list = append(list, []byte(s))
	}

	k, err := seal.NewKeys(list, "heartbeat")
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// receiver decodes datagrams and keeps what they contain.
type receiver struct {
	*Decoder
	beats   []*Beat
	replies []*Reply
	tables  []uint64
}

func newReceiver(t rapid.TB, name string, k *seal.Keys) *receiver {
	t.Helper()
	r := &receiver{}

	var err error
	r.Decoder, err = NewDecoder(DecoderConfig{
		Name: name, Partitions: partitions, Keys: k,
		OnBeat:  onBeat(func(b *Beat) { r.beats = append(r.beats, b) }),
		OnReply: onReply(func(a *Reply) { r.replies = append(r.replies, a) }),
		OnTable: onTable(func(_ string, hash uint64) { r.tables = append(r.tables, hash) }),
	})

	if err != nil {
		t.Fatal(err)
	}
	return r
}

func packBeats(t rapid.TB, e *Encoder, beats ...*Beat) (datagrams [][]byte) {
	t.Helper()
	e.Beats(beats, 7, func(p []byte) { datagrams = append(datagrams, slices.Clone(p)) })
	return datagrams
}

func packReplies(t rapid.TB, e *Encoder, replies ...*Reply) (datagrams [][]byte) {
	t.Helper()
	e.Replies(replies, 7, func(p []byte) { datagrams = append(datagrams, slices.Clone(p)) })
	return datagrams
}

// userOf returns a user of the partition.
func userOf(partition int, n uint64) presence.User {
	return presence.User(n - n%partitions + uint64(partition))
}

func genUser(partition int) *rapid.Generator[presence.User] {
	return rapid.Map(rapid.Uint64Range(0, 1<<64-2*partitions),
		func(n uint64) presence.User { return userOf(partition, n) })
}

var (
	genPage = rapid.OneOf(
		rapid.SampledFrom([]string{"home", "news/1", ""}),
		rapid.StringOfN(rapid.Rune(), 0, presence.MaxPageLength, MaxPage),
		rapid.SampledFrom([]string{strings.Repeat("x", MaxPage)}),
	)

	genBeat = rapid.Custom(func(t *rapid.T) *Beat {
		part := rapid.IntRange(0, partitions-1).Draw(t, "partition")
		op := rapid.Custom(func(t *rapid.T) Op {
			return Op{
				Kind: rapid.SampledFrom([]Kind{Join, Leave}).Draw(t, "kind"),
				User: genUser(part).Draw(t, "user"),
				Page: genPage.Draw(t, "page"),
				Grace: time.Duration(rapid.Int64Range(0, 1<<62/int64(time.Millisecond)).Draw(t,
					"grace")) * time.Millisecond,
			}
		})
		return &Beat{
			Source: from, Partition: part,
			Stream: rapid.Uint64().Draw(t, "stream"),
			First:  rapid.Uint64().Draw(t, "first"),
			Whole:  rapid.Uint64().Draw(t, "whole"),
			Ops:    rapid.SliceOfN(op, 0, MaxOps).Draw(t, "ops"),
			Alive:  rapid.SliceOfN(genUser(part), 0, 1024).Draw(t, "alive"),
		}
	})
	genCount = rapid.Custom(func(t *rapid.T) presence.Count {
		c := presence.Count{
			Page:  genPage.Draw(t, "page"),
			Users: rapid.Int64Min(0).Draw(t, "users"),
			Version: presence.Version{
				Incarnation: rapid.Uint64().Draw(t, "incarnation"), Sequence: rapid.Uint64().Draw(t, "sequence"),
			},
			Stale:   rapid.Bool().Draw(t, "stale"),
			Without: rapid.SampledFrom([]string{"", "eu", "eu,us"}).Draw(t, "without"),
		}
		if rapid.Bool().Draw(t, "joined ever") {
			c.Updated = time.Unix(rapid.Int64Range(0, 1<<40).Draw(t, "updated"), 0).UTC()
		}
		return c
	})
	genReply = rapid.Custom(func(t *rapid.T) *Reply {
		part := rapid.IntRange(0, partitions-1).Draw(t, "partition")
		return &Reply{
			Partition: part,
			Acked:     rapid.Uint64().Draw(t, "acked"),
			Counted:   rapid.Uint64().Draw(t, "counted"),
			Reset:     rapid.Bool().Draw(t, "reset"),
			Ask:       rapid.Bool().Draw(t, "ask"),
			Counts:    rapid.SliceOfN(genCount, 0, 100).Draw(t, "counts"),
			Unknown:   rapid.SliceOfN(genUser(part), 0, 600).Draw(t, "unknown"),
		}
	})
)

type numbered struct {
	partition      int
	stream, number uint64
	op             Op
}

// wholes returns, for each partition and stream, up to which number the stream is complete in the beats.
func wholes(beats []*Beat) map[[3]uint64]bool {
	all := map[[3]uint64]bool{}
	for _, b := range beats {
		if b.First > 0 || len(b.Ops) > 0 {
			all[[3]uint64{uint64(b.Partition), b.Stream, b.Whole}] = true
		}
	}
	return all
}

// said returns the operations and live users in the beats, however they are divided among datagrams.
func said(t rapid.TB, beats []*Beat) (ops []numbered, alive map[int][]presence.User) {
	t.Helper()
	alive = map[int][]presence.User{}

	for _, b := range beats {
		if b.Source != from {
			t.Fatalf("source %+v", b.Source)
		}
		for i, op := range b.Ops {
			ops = append(ops, numbered{b.Partition, b.Stream, b.First + uint64(i), op})
		}

		if len(b.Alive) > 0 {
			alive[b.Partition] = append(alive[b.Partition], b.Alive...)
		}
	}

	return ops, alive
}

func beatsComeBack(t *rapid.T) {
	beats := rapid.SliceOfN(genBeat, 0, 5).Draw(t, "beats")
	k := keys(t, "secret")
	r := newReceiver(t, "to:1", k)
	for _, p := range packBeats(t, NewEncoder(from, "to:1", k, 0), beats...) {
		if err := r.Decode(p); err != nil {
			t.Fatalf("%d bytes: %v", len(p), err)
		}
	}

	ops, alive := said(t, beats)
	gotOps, gotAlive := said(t, r.beats)
	if !reflect.DeepEqual(ops, gotOps) {
		t.Fatalf("sent ops\n%+v\ngot\n%+v", ops, gotOps)
	}

	if !reflect.DeepEqual(alive, gotAlive) {
		t.Fatalf("sent users\n%v\ngot\n%v", alive, gotAlive)
	}
	if sent, got := wholes(beats), wholes(r.beats); !reflect.DeepEqual(sent, got) {
		t.Fatalf("sent streams\n%v\ngot\n%v", sent, got)
	}
}

func repliesComeBack(t *rapid.T) {
	replies := rapid.SliceOfN(genReply, 0, 5).Draw(t, "replies")
	for i, r := range replies {
		r.Stream = uint64(i + 1) // identifies the parts of a reply
	}

	k := keys(t, "secret")
	rec := newReceiver(t, "to:1", k)
	for _, p := range packReplies(t, NewEncoder(from, "to:1", k, 0), replies...) {
		if err := rec.Decode(p); err != nil {
			t.Fatalf("%d bytes: %v", len(p), err)
		}
	}

	var got []*Reply
	for i, part := range rec.replies {
		// The parts of a reply come one after the other.
		if i == 0 || got[len(got)-1].Stream != part.Stream {
			got = append(got, &Reply{Partition: part.Partition, Stream: part.Stream})
		}

		whole := got[len(got)-1]
		if whole.Acked != 0 || whole.Reset || whole.Ask {
			t.Fatal("a part follows the one that acknowledges")
		}
		whole.Acked = part.Acked
		whole.Reset = part.Reset
		whole.Ask = part.Ask
		whole.Counted = part.Counted

		// Every part has this number, without which its counts mean nothing.
		if want := replies[part.Stream-1].Counted; part.Counted != want {
			t.Fatalf("a part has counts that include the joins up to %d, want %d", part.Counted, want)
		}

		whole.Counts = append(whole.Counts, part.Counts...)
		whole.Unknown = append(whole.Unknown, part.Unknown...)
	}

	if len(got) != len(replies) {
		t.Fatalf("got %d replies, want %d", len(got), len(replies))
	}
	for i, want := range replies {
		if !slices.Equal(want.Counts, got[i].Counts) || !slices.Equal(want.Unknown, got[i].Unknown) {
			t.Fatalf("sent\n%+v\ngot\n%+v", want, got[i])
		}

		// The lists, which are divided among parts, are equal. All other fields are in the last part.
		w, g := *want, *got[i]
		w.Counts, g.Counts = nil, nil
		w.Unknown, g.Unknown = nil, nil
		if !reflect.DeepEqual(w, g) {
			t.Fatalf("sent\n%+v\ngot\n%+v", w, g)
		}
	}
}

func TestBeatsComeBack(t *testing.T)   { rapid.Check(t, beatsComeBack) }
func TestRepliesComeBack(t *testing.T) { rapid.Check(t, repliesComeBack) }

func alive(partition, n int) *Beat {
	b := &Beat{Source: from, Partition: partition, Stream: 1}
	for i := range n {
		b.Alive = append(b.Alive, userOf(partition, uint64(i)*0x9E3779B97F4A7C15>>1))
	}
	return b
}

// TestDatagramsAreFull: a heartbeat costs little more than its 8 bytes, and small messages share datagrams.
func TestDatagramsAreFull(t *testing.T) {
	var beats []*Beat
	for p := range 100 {
		beats = append(beats, alive(p, 50))
	}

	e := NewEncoder(from, "to:1", keys(t, "s"), 0)

	size := 0
	for _, p := range packBeats(t, e, beats...) {
		size += len(p)
	}

	perUser := float64(size) / 5000
	t.Logf("%.2f bytes for each of the living", perUser)
	if perUser > 8.8 {
		t.Errorf("a live user costs %.2f bytes", perUser)
	}

	var joins []*Beat
	for p := range 100 {
		joins = append(joins, &Beat{
			Source: from, Partition: p, Stream: 1700000000000, First: 1,
			Ops: []Op{{Kind: Join, User: userOf(p, 1<<60), Page: "home"}},
		})
	}

	if n := len(packBeats(t, e, joins...)); n > 4 {
		t.Errorf("100 joins need %d datagrams", n)
	}

	var replies []*Reply
	for p := range 100 {
		replies = append(replies, &Reply{Partition: p, Stream: 1700000000000, Acked: 1})
	}

	if n := len(packReplies(t, e, replies...)); n > 3 {
		t.Errorf("100 acknowledgements need %d datagrams", n)
	}
}

func TestGraceIsRoundedUp(t *testing.T) {
	k := keys(t)
	r := newReceiver(t, "to:1", k)
	ops := []Op{{Kind: Leave, Grace: 1}, {Kind: Leave, Grace: -1}, {Kind: Leave, Grace: 2 * time.Second}}
	for _, p := range packBeats(t, NewEncoder(from, "to:1", k, 0), &Beat{Source: from, Ops: ops}) {
		if err := r.Decode(p); err != nil {
			t.Fatal(err)
		}
	}

	for i, want := range []time.Duration{time.Millisecond, 0, 2 * time.Second} {
		if got := r.beats[0].Ops[i].Grace; got != want {
			t.Errorf("a grace of %s arrived as %s", ops[i].Grace, got)
		}
	}
}

// resign signs a datagram again after a test has changed it.
func resign(k *seal.Keys, p []byte) []byte {
	p = p[:len(p)-seal.Size]
	binary.LittleEndian.PutUint16(p[4:], uint16(len(p)+seal.Size))
	return k.Signer().Sign(p, p)
}

func TestRefusals(t *testing.T) {
	k := keys(t, "secret")
	change := func(at int, b ...byte) func([]byte) []byte {
		return func(p []byte) []byte {
			copy(p[at:], b)
			return p
		}
	}

	signed := func(at int, b ...byte) func([]byte) []byte {
		return func(p []byte) []byte {
			copy(p[at:], b)
			return resign(k, p)
		}
	}

	header := 53 + len(from.Gateway)

	for name, tc := range map[string]struct {
		change func([]byte) []byte
		want   error
	}{
		"as it is":         {func(p []byte) []byte { return p }, nil},
		"signed again":     {signed(0), nil},
		"nothing":          {func(p []byte) []byte { return nil }, ErrTruncated},
		"header alone":     {func(p []byte) []byte { return p[:51] }, ErrTruncated},
		"cut short":        {func(p []byte) []byte { return p[:len(p)-1] }, ErrTruncated},
		"something behind": {func(p []byte) []byte { return append(p, 0) }, ErrMalformed},
		"too long": {
			func(p []byte) []byte { return append(p, make([]byte, MaxDatagram)...) }, ErrOversized,
		},
		"another protocol": {change(0, 'G', 'E'), ErrMagic},
		"another version":  {change(2, 2), ErrVersion},
		"another key": {func(p []byte) []byte {
			q := resign(keys(t, "x"), p)
			copy(q[7:], "xxxx")
			return q
		}, seal.ErrKey},
		"no key":                 {change(7, 0, 0, 0, 0), seal.ErrKey},
		"forged body":            {change(header+5, 1), seal.ErrForged},
		"forged time":            {func(p []byte) []byte { p[11]++; return p }, seal.ErrForged},
		"forged signature":       {func(p []byte) []byte { p[len(p)-1]++; return p }, seal.ErrForged},
		"too old":                {signed(11, make([]byte, 8)...), seal.ErrOld},
		"of the future":          {signed(17, 1), seal.ErrFuture},
		"number zero":            {signed(19, make([]byte, 8)...), seal.ErrReplayed},
		"meant for another":      {signed(35, 1), ErrMisdirected},
		"header longer than all": {signed(6, 255), ErrMalformed},
		"header too short":       {signed(6, 52), ErrMalformed},
		"name too long":          {signed(51, 255), ErrMalformed},
		"record too long":        {signed(header+1, 255), ErrMalformed},
		"half a user":            {signed(header+1, 4), ErrMalformed},
		"unknown kind":           {signed(3, 99), nil},
		"unknown record":         {signed(header, 99), nil},
		"partition out of range": {signed(header, 2, 8, 0, 0x90, 0x02, 1, 1, 0, 0, 0, 0), ErrPartitions},
		"many ops of nothing":    {signed(header, 2, 8, 0, 1, 1, 1, 255, 255, 0, 0, 0), ErrMalformed},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(t, "to:1", k)
			p := packBeats(t, NewEncoder(from, "to:1", k, 0), alive(1, 1))[0]

			if err := r.Decode(tc.change(p)); !errors.Is(err, tc.want) {
				t.Fatalf("got %v, want %v", err, tc.want)
			}

			if tc.want != nil && len(r.beats) > 0 {
				t.Error("the refused datagram was delivered")
			}
		})
	}
}

func TestUserOfAnotherPartitionIsRefused(t *testing.T) {
	k := keys(t)
	r := newReceiver(t, "to:1", k)
	p := packBeats(t, NewEncoder(from, "to:1", k, 0), &Beat{
		Source: from, Partition: 1, Ops: []Op{{Kind: Join, User: 2}},
	})[0]

	if err := r.Decode(p); !errors.Is(err, ErrPartitions) {
		t.Fatal(err)
	}
}

// TestAge: the receiver knows how long a list of live users was in transit, unless its sender is of an older release,
// which uses its own clock.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := keys(t, "secret")
		flags := 52 + len(from.Gateway)
		e := NewEncoder(from, "to:1", k, 0)
		r := newReceiver(t, "to:1", k)

		// A datagram of the older release has no flags, so both lengths are one less.
		ours := packBeats(t, e, alive(1, 1))[0]
		older := packBeats(t, e, alive(1, 1))[0]
		older = slices.Delete(older, flags, flags+1)
		older[6]-- // the length of the header
		older[4]-- // the length of the datagram

		time.Sleep(5 * time.Second)
		for i, p := range [][]byte{ours, resign(k, older)} {
			if err := r.Decode(p); err != nil {
				t.Fatal(err)
			}

			want := []time.Duration{5 * time.Second, 0}[i]
			if got := r.beats[i].Age; got != want {
				t.Errorf("datagram %d: %s, want %s", i, got, want)
			}
		}
	})
}

// TestFormatCanGrow: additions of later versions are skipped.
func TestFormatCanGrow(t *testing.T) {
	k := keys(t, "secret")
	header := 53 + len(from.Gateway)
	op := []byte{1, 9, 0, 0, 0, 0, 0, 0, 0, 2, 'p', 0} // join of user 9 on p

	ops := func(extra []byte, list ...[]byte) []byte {
		b := []byte{9, 1, 1, byte(len(list)), 0}
		for _, o := range list {
			b = append(append(b, byte(len(o))), o...)
		}
		b = append(b, extra...)
		return append([]byte{2, byte(len(b)), 0}, b...)
	}

	build := func(what byte, grow int, records ...[]byte) []byte {
		p := packBeats(t, NewEncoder(from, "to:1", k, 0), alive(1, 1))[0][:header]
		p[3] = what
		p[6] += byte(grow)
		p = append(p, make([]byte, grow)...)
		for _, r := range records {
			p = append(p, r...)
		}
		return resign(k, append(p, make([]byte, seal.Size)...))
	}

	// An op that is longer, and one of a kind that this version does not know.
	later := append(slices.Clone(op), 1, 2, 3)
	unknown := append([]byte{77}, op[1:]...)
	for name, tc := range map[string]struct {
		p    []byte
		want []uint64 // numbers of the accepted ops
	}{
		"nothing new":        {build(1, 0, ops(nil, op)), []uint64{1}},
		"header":             {build(1, 9, ops(nil, op)), []uint64{1}},
		"kind of record":     {build(1, 0, []byte{99, 3, 0, 1, 2, 3}, ops(nil, op)), []uint64{1}},
		"end of record":      {build(1, 0, ops([]byte{1, 2, 3}, op, op)), []uint64{1, 2}},
		"end of op":          {build(1, 0, ops(nil, later, op)), []uint64{1, 2}},
		"kind of op":         {build(1, 0, ops(nil, op, unknown, op)), []uint64{1}},
		"kind of op at once": {build(1, 0, ops(nil, unknown, op)), nil},
		"kind of datagram":   {build(9, 0, ops(nil, op)), nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReceiver(t, "to:1", k)
			if err := r.Decode(tc.p); err != nil {
				t.Fatal(err)
			}

			var got []uint64
			list, _ := said(t, r.beats)
			for _, n := range list {
				got = append(got, n.number)
				if n.op != (Op{Kind: Join, User: 9, Page: "p"}) {
					t.Errorf("got op %+v, want the join of user 9 on p", n.op)
				}
			}

			if !slices.Equal(got, tc.want) {
				t.Errorf("got ops %v, want %v", got, tc.want)
			}
		})
	}

	// A reply may grow as well, in each of its counts and at its end.
	r := newReceiver(t, "to:1", k)
	count := []byte{0, 1, 'p', 5, 0, 1, 2, 99, 99}
	body := append([]byte{9, 1, 4, 0x81, 1, 0, byte(len(count))}, count...)
	body = append(body, 0, 0, 3, 42)

	if err := r.Decode(build(2, 0, append([]byte{3, byte(len(body)), 0}, body...))); err != nil {
		t.Fatal(err)
	}

	want := &Reply{
		Partition: 9, Stream: 1, Acked: 4, Counted: 3, Reset: true, Counts: []presence.Count{
			{Page: "p", Users: 5, Version: presence.Version{Incarnation: 1, Sequence: 2}},
		},
	}

	if !reflect.DeepEqual(r.replies, []*Reply{want}) {
		t.Errorf("got the replies %+v", r.replies)
	}
}

func TestTableIsTold(t *testing.T) {
	k := keys(t)
	r := newReceiver(t, "to:1", k)
	err := r.Decode(packBeats(t, NewEncoder(from, "to:1", k, 0), alive(1, 1))[0])
	if err != nil || !slices.Equal(r.tables, []uint64{7}) {
		t.Fatal(err, r.tables)
	}
}

// TestDecodingAllocatesLittle: all users of a datagram take two blocks of memory.
func TestDecodingAllocatesLittle(t *testing.T) {
	k := keys(t, "s")
	e := NewEncoder(from, "to:1", k, 0)
	// Unlike that of other tests this receiver keeps nothing, so that only the decoder allocates.
	d, err := NewDecoder(DecoderConfig{Name: "to:1", Partitions: partitions, Keys: k, OnBeat: onBeat(func(*Beat) {})})
	if err != nil {
		t.Fatal(err)
	}

	var list [][]byte
	for range 1000 {
		list = append(list, packBeats(t, e, alive(1, 60), alive(2, 60))...)
	}

	i := 0
	n := testing.AllocsPerRun(len(list)-2, func() {
		if err := d.Decode(list[i]); err != nil {
			t.Fatal(err)
		}

		i++
	})

	if n > 2 {
		t.Errorf("%.1f allocations for a datagram, want 2 or few more", n)
	}
}

// FuzzDatagram: any datagram is refused or understood.
func FuzzDatagram(f *testing.F) {
	k := keys(f)
	f.Add([]byte{})
	f.Add(packBeats(f, NewEncoder(from, "to:1", k, 0), alive(1, 3))[0])
	f.Add(packReplies(f, NewEncoder(from, "to:1", k, 0),
		&Reply{Partition: 1, Acked: 1, Unknown: []presence.User{1}})[0])

	f.Fuzz(func(t *testing.T, p []byte) {
		r := newReceiver(t, "to:1", k)
		_ = r.Decode(p)
	})
}

// FuzzRecords is FuzzDatagram with a valid signature and time. Decoded messages are the same when they are encoded and
// decoded again, and take memory in proportion to the datagram.
func FuzzRecords(f *testing.F) {
	k := keys(f)
	header := 53 + len(from.Gateway)
	seed := func(p []byte) {
		f.Add(p[3], p[header:len(p)-seal.Size])
	}

	e := NewEncoder(from, "to:1", k, 0)
	op := Op{Kind: Join, User: userOf(1, 1<<40), Page: "home"}
	leave := Op{Kind: Leave, User: userOf(1, 1<<50), Page: "home", Grace: 2 * time.Second}

	// The seeds are beats with ops and users, replies with counts, complete streams, and a question.
	seed(packBeats(f, e, &Beat{
		Source: from, Partition: 1, Stream: 5, First: 3, Ops: []Op{op, leave}, Alive: []presence.User{userOf(1, 7000)},
	}, alive(2, 3))[0])

	seed(packReplies(f, e, &Reply{
		Partition: 1, Stream: 5, Acked: 4, Reset: true, Unknown: []presence.User{userOf(1, 7000)},
		Counts: []presence.Count{
			{
				Page: "home", Users: 9, Updated: time.Unix(1700000000, 0).UTC(),
				Version: presence.Version{Incarnation: 1, Sequence: 2}, Stale: true,
			},
		},
	}, &Reply{Partition: 2})[0])

	seed(packBeats(f, e, &Beat{Source: from, Partition: 1, Stream: 6, First: 1, Whole: 1}, &Beat{
		Source: from, Partition: 2, Stream: 6, First: 1, Whole: 1 << 40,
	})[0])
	seed(packReplies(f, e, &Reply{Partition: 1, Stream: 6, Ask: true})[0])

	f.Fuzz(func(t *testing.T, what byte, records []byte) {
		p := packBeats(t, NewEncoder(from, "to:1", k, 0), alive(1, 1))[0][:header]
		p[3] = what
		p = resign(k, append(append(p, records...), make([]byte, seal.Size)...))

		r := newReceiver(t, "to:1", k)
		if err := r.Decode(p); err != nil {
			if len(r.beats)+len(r.replies) > 0 {
				t.Fatal("the refused datagram was delivered")
			}
			return
		}

		ops, living := said(t, r.beats)

		// The decoded messages are encoded and decoded again.
		again := newReceiver(t, "to:1", k)
		e := NewEncoder(from, "to:1", k, 0)
		for _, p := range append(packBeats(t, e, r.beats...), packReplies(t, e, r.replies...)...) {
			if err := again.Decode(p); err != nil {
				t.Fatal(err)
			}
		}

		gotOps, gotLiving := said(t, again.beats)
		if !reflect.DeepEqual(ops, gotOps) || !reflect.DeepEqual(living, gotLiving) {
			t.Fatalf("%v %v became %v %v", ops, living, gotOps, gotLiving)
		}

		if whole, got := wholes(r.beats), wholes(again.beats); !reflect.DeepEqual(whole, got) {
			t.Fatalf("%v became %v", whole, got)
		}

		// A small datagram must not take much memory.
		if len(ops) > len(records)/12 || len(r.beats)+len(r.replies) > len(records)/3 {
			t.Fatalf("%d bytes became %d ops, %d beats, %d replies",
				len(records), len(ops), len(r.beats), len(r.replies))
		}

		counts := func(replies []*Reply) (n, unknown int) {
			for _, r := range replies {
				n += len(r.Counts)
				unknown += len(r.Unknown)
			}
			return n, unknown
		}

		n, unknown := counts(r.replies)
		if m, u := counts(again.replies); m != n || u != unknown {
			t.Fatalf("%d counts, %d unknown became %d, %d", n, unknown, m, u)
		}
	})
}

func FuzzBeatsComeBack(f *testing.F)   { f.Fuzz(rapid.MakeFuzz(beatsComeBack)) }
func FuzzRepliesComeBack(f *testing.F) { f.Fuzz(rapid.MakeFuzz(repliesComeBack)) }
