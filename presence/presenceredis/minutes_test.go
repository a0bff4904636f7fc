package presenceredis

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/presence/pncounter"
)

// The next change after the end of a minute writes that minute. Each process writes its own arrivals. Every process
// answers for all of them, even when the others have ended.
func TestServerMinutesOfSeveralProcesses(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	cfg := Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "local", Secret: "k"}, PageStats: time.Hour,
	}
	reader := open(t, cfg)
	var both [2]*Store // they end before the test does
	for i := range both {
		both[i] = Open(cfg)
	}

	first, second := both[0], both[1]
	b := presence.Bucket("p", first.cfg.Buckets)
	key := at(t, reader).pagePrefix(b) + "p"

	set := func(s *Store, partition int, users int64, arrivals ...presence.User) {
		t.Helper()
		claims, err := s.Claim(t.Context(), "n", []int{partition}, false)
		if err != nil {
			t.Fatal(err)
		}
		change := presence.Change{
			Claim: claims[0], Sequence: 1, Counts: []presence.PageUsers{{Page: "p", Users: users}},
		}
		for _, u := range arrivals {
			change.Arrivals = append(change.Arrivals, presence.Arrival{User: u, Page: "p"})
		}

		if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
	back := func(minutes int) { older(t, server, key, minutes) }
	answer := func(s *Store) minutes.Answer { return remembers(t, s) }

	began := time.Now().Truncate(time.Minute)
	set(first, 1, 5, 1, 2, 3, 4, 5)
	set(second, 2, 2, 6, 7)
	set(first, 1, 1) // 3 users are left on the page
	back(30)
	set(second, 2, 0)
	back(20) // 1 user has been there for 20 minutes
	set(second, 2, 1, 7)

	want := func(when string, a minutes.Answer) {
		t.Helper()
		n := len(a.Points)
		ago := func(minutes int) int64 { return a.Points[n-1-minutes].Max }

		// A new minute may begin between two steps of the test, so neighbours are accepted.
		if a.Now != 2 || ago(40) != 0 || max(ago(29), ago(30), ago(31), ago(32)) != 7 || ago(25) != 3 || ago(10) != 1 ||
			ago(0) != 2 {
			t.Errorf("%s: the answer is %+v", when, a)
		}
	}

	testkit.Eventually(t, "the minutes that ended are written", func() bool { return answer(reader).Peak.Max == 7 })
	want("another process", answer(reader))

	// The arrivals of the running minute are known only to the process that counted them.
	if a := answer(second); (a.Joins != 3 || a.Visitors != 7) && time.Now().Truncate(time.Minute).Equal(began) {
		t.Errorf("with its own arrivals of the running minute a process has %d joins and %d visitors, want 3 and 7",
			a.Joins, a.Visitors)
	}

	for _, s := range both {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}

	if a := answer(reader); a.Joins != 8 || a.Visitors != 7 {
		t.Errorf("after both have ended there are %d joins and %d visitors, want 8 and 7", a.Joins, a.Visitors)
	}

	for _, key := range []string{
		at(t, reader).minutesKey(b, "p"), at(t, reader).visitsKey(b, minutes.Of(time.Now())/60, "p"),
	} {
		if left := server.Do(t, "TTL", key); fmt.Sprint(left) == "-1" {
			t.Errorf("%s does not expire", key)
		}
	}
}

// older moves the page's last change back by that many minutes, as if so much time had passed.
func older(t testing.TB, server *redistest.Server, key string, minutes int) {
	t.Helper()
	text := server.Do(t, "GETRANGE", key, "9", "13").(string)
	at := binary.BigEndian.Uint64(append(make([]byte, 3), text...)) - uint64(minutes*60)
	server.Do(t, "SETRANGE", key, "9", string(binary.BigEndian.AppendUint64(nil, at)[3:]))
}

// remembers returns the statistics of page p for the last 50 minutes.
func remembers(t testing.TB, s *Store) minutes.Answer {
	t.Helper()
	now := time.Now()
	q, err := minutes.Ask(50*time.Minute, time.Minute, time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}

	list, err := s.Minutes(t.Context(), "p", q.From)
	if err != nil {
		t.Fatal(err)
	}

	counts, err := s.Counts(t.Context(), []string{"p"})
	if err != nil {
		t.Fatal(err)
	}

	return q.Answer("p", list, counts[0].Users, now)
}

// A change in another region changes the total, so it can end a minute, too.
func TestServerMinutesOfAnotherRegion(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "us", Secret: "k"}, Peers: []string{"eu"},
		PageStats: time.Hour, Partitions: 1,
	})

	claims, err := s.Claim(t.Context(), "n", []int{0}, false)
	if err != nil {
		t.Fatal(err)
	}
	c := presence.Change{
		Claim: claims[0], Sequence: 1, Counts: []presence.PageUsers{{Page: "p", Users: 2}}, Complete: true,
	}
	if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
		t.Fatal(o[0].Err)
	}

	b := presence.Bucket("p", s.cfg.Buckets)
	peer := NewPeer(s, "eu", "us")

	merge := func(to uint64, up, down int64) {
		t.Helper()
		acks, err := peer.Merge(t.Context(), []pncounter.Batch{{
			Region: "eu", Bucket: b, Log: 5, From: to - 1, To: to, Floor: 1, Complete: true,
			Pages: []pncounter.PagePair{
				{Page: "p", Pair: pncounter.Pair{Incarnation: 5, Increments: up, Decrements: down}},
			},
		}})
		if err != nil || acks[0].Status != pncounter.Merged {
			t.Fatalf("the merge is answered %+v, %v; want it merged", acks, err)
		}
	}

	older(t, server, at(t, s).pagePrefix(b)+"p", 20)
	merge(1, 4, 0) // 6 in all

	older(t, server, at(t, s).pagePrefix(b)+"p", 10)

	merge(2, 4, 3)

	var a minutes.Answer
	ago := func(minutes int) int64 { return a.Points[len(a.Points)-1-minutes].Max }

	testkit.Eventually(t, "the minutes that ended are written", func() bool {
		a = remembers(t, s)
		return ago(15) == 2 && ago(5) == 6
	})

	if a.Now != 3 || a.Peak.Max != 6 || ago(15) != 2 || ago(5) != 6 || ago(30) != 0 {
		t.Errorf("the answer is %+v", a)
	}

	// In a new generation all counts are written again, and the minutes of the page stay.
	older(t, server, at(t, s).pagePrefix(b)+"p", 2)
	server.Do(t, "DEL", at(t, s).tokenKey(0)) // begins a generation, like a restart
	if _, err := s.Claim(t.Context(), "n", []int{0}, true); err != nil {
		t.Fatal(err)
	}

	merge(3, 5, 3)
	testkit.Eventually(t, "the page remembers what was before", func() bool {
		a = remembers(t, s)
		return a.Now == 2 && a.Peak.Max == 6 && ago(15) == 2 && ago(5) == 6 && ago(1) == 3
	})
}

// Redis restarts, and the nodes write all counts again. Its minutes stay.
func TestClockMinutesAreKeptOverARestart(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Durable...)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "local", Secret: "k"}, PageStats: time.Hour,
		Partitions: 1,
	})

	key := at(t, s).pagePrefix(presence.Bucket("p", s.cfg.Buckets)) + "p"
	var claims []presence.Claim
	claim := func() (err error) {
		claims, err = s.Claim(t.Context(), "n", []int{0}, true)
		return err
	}

	set := func(users int64) {
		t.Helper()
		change := presence.Change{
			Claim: claims[0], Sequence: uint64(time.Now().UnixNano()),
			Counts: []presence.PageUsers{{Page: "p", Users: users}},
		}
		if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}

	want := func(when string) {
		t.Helper()
		testkit.Eventually(t, "the minutes that ended are written", func() bool {
			a := remembers(t, s)
			ago := func(minutes int) int64 { return a.Points[len(a.Points)-1-minutes].Max }
			return a.Peak.Max == 7 && ago(40) == 0 && max(ago(20), ago(21)) == 7 && ago(10) == 3
		})

		if a := remembers(t, s); a.Now > 0 && a.Now != 3 {
			t.Errorf("%s: the answer is %+v, want 3 users now", when, a)
		}
	}

	if err := claim(); err != nil {
		t.Fatal(err)
	}
	set(7)
	set(3)
	older(t, server, key, 20)
	want("before")

	server.Restart(t)
	testkit.Eventually(t, "a claim", func() bool { return claim() == nil })
	want("before the counts are written again")

	set(2)
	set(3)
	want("after")
}

// Another program has taken the key of one page, so its minutes cannot be written. Those of other pages are written,
// and only once: a string has a bounded number of entries, and repetitions would push out older minutes.
func TestServerAForeignKeyHoldsUpNoMinuteOfOthers(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), PageStats: time.Hour})
	c, err := s.conn.Known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	s.stop() // from here on only the test writes
	s.background.Wait()

	now := minutes.Of(time.Now())
	bad := pageIn(2, "bad")
	good := map[string]int{pageIn(1, "elsewhere"): 1, pageIn(2, "beside"): 2} // page -> bucket

	c.LPush(t.Context(), at(t, s).minutesKey(2, bad), "theirs")
	c.LPush(t.Context(), at(t, s).visitsKey(2, (now-1)/60, bad), "theirs")
	changes := func(bucket int, page string) {
		head := string([]byte{byte(len(page) >> 8), byte(len(page))})
		s.minutes.minutesEnded(bucket, head+page+strings.Repeat("\x00", endedBytes))
		s.minutes.visits[visit{page, now - 1}] = &minutes.Visits{Joins: 1}
	}
	changes(2, bad)
	for page, bucket := range good {
		changes(bucket, page)
	}

	written := func(page string, bucket int) (bytes, entries int64) {
		bytes = c.StrLen(t.Context(), at(t, s).minutesKey(bucket, page)).Val()
		entries = c.HLen(t.Context(), at(t, s).visitsKey(bucket, (now-1)/60, page)).Val()
		return bytes, entries
	}

	for range 3 {
		s.minutes.write(t.Context(), now)
	}
	if n, m := len(s.minutes.counts), len(s.minutes.visits); n+m > 0 {
		t.Errorf("%d minutes and %d with arrivals still wait for a foreign key, want none", n, m)
	}
	for page, bucket := range good {
		if bytes, entries := written(page, bucket); bytes != entryBytes || entries != 1 {
			t.Errorf("%s has %d bytes and %d entries of one minute, want %d and 1", page, bytes, entries, entryBytes)
		}
	}
}

// The clock of a process was right, then two hours ahead, and is set back. Arrivals are written with the next minute,
// beside those of the same minute from before, and none of them waits until the clock has caught up.
func TestServerArrivalsAfterTheClockWasSetBack(t *testing.T) {
	cfg := Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), PageStats: 24 * time.Hour}
	s, other := open(t, cfg), open(t, cfg)
	s.stop() // from here on only the test writes
	s.background.Wait()
	s.minutes.latest = 0
	at(t, s)

	arrive := func(u presence.User) { s.minutes.arrived([]presence.Arrival{{User: u, Page: "p"}}) }
	now := minutes.Of(time.Now())
	arrive(1)
	s.minutes.write(t.Context(), now+1)

	ahead := now + 120
	s.minutes.latest = ahead
	s.minutes.visits[visit{"p", ahead}] = &minutes.Visits{}
	s.minutes.visits[visit{"p", ahead}].Add(2)

	arrive(3)
	s.minutes.write(t.Context(), minutes.Of(time.Now())+1)

	list, err := other.Minutes(t.Context(), "p", now)
	if err != nil {
		t.Fatal(err)
	}
	joins := int64(0)
	for _, m := range list {
		joins += m.Joins
	}
	if joins != 3 {
		t.Errorf("%d arrivals are written, want 3: %+v", joins, list)
	}
}
