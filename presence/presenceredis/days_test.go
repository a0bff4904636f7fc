package presenceredis

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/minutes"
)

// Runs of remember.lua, some of them repeated, write the changes of a page over many days. The stored days are the same
// as those that package minutes computes.
func TestServerDaysAreThoseOfTheCalendar(t *testing.T) {
	const first, days, keep = 20_000, 40, 30
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), PageStats: time.Hour, PageDays: keep})
	c, err := s.known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	rnd := rand.New(rand.NewPCG(3, 4))
	want := &minutes.Calendar{}
	page := "days"
	bucket := presence.Bucket(page, s.cfg.Buckets)
	m := &s.minutes

	var calls []*scriptRun
	users, area, until := int64(0), int64(0), int64(0) // users times ms in this day, up to until
	visits := map[visit]*minutes.Visits{}
	for minute := int64(first) * minutes.MinutesOfDay; minute < (first+days)*minutes.MinutesOfDay; {
		most := users
		for at := minute * 60_000; ; { // the changes of one minute
			at += 1 + rnd.Int64N(30_000)
			if at >= (minute+1)*60_000 {
				break
			}
			area, until = since(area, until, at, users), at
			now := time.UnixMilli(at)
			if rnd.IntN(2) == 0 && users > 0 {
				users--
			} else {
				users++
				u := presence.User(rnd.IntN(300))
				want.Arrive(u, now)
				v := visits[visit{page, minute}]
				if v == nil {
					v = &minutes.Visits{}
					visits[visit{page, minute}] = v
				}
				v.Add(u)
			}
			want.Count(users, now)
			most = max(most, users)
		}

		area, until = since(area, until, (minute+1)*60_000-1, users), (minute+1)*60_000-1
		end := area + users
		entry := binary.BigEndian.AppendUint32(nil, uint32(minute))
		entry = appendNumber(appendNumber(appendNumber(entry, uint64(most), 5), uint64(users), 5), uint64(end), 7)
		counts := m.countsPart([]endedMinute{{bucket, page, string(entry)}}).scriptRun
		calls = append(calls, counts)
		if visits[visit{page, minute}] != nil {
			m.mu.Lock()
			m.visits = visits
			calls = append(calls, m.visitsPartLocked(bucket, []visit{{page, minute}}).scriptRun)
			m.visits = map[visit]*minutes.Visits{}
			m.mu.Unlock()
		}
		pause := 1 + rnd.Int64N(300)
		if rnd.IntN(20) == 0 {
			pause = rnd.Int64N(4000)
		}
		minute += max(1, pause)
	}

	for part := range slices.Chunk(calls, 50) {
		again := make([]*scriptRun, 0, 2*len(part))
		for _, cl := range part {
			again = append(again, &scriptRun{Script: cl.Script, Keys: cl.Keys, Args: cl.Args})
		}

		for range 1 + rnd.IntN(2) { // a run whose answer was lost is repeated
			if err := s.conn.Run(t.Context(), again); err != nil {
				t.Fatal(err)
			}
		}
	}

	// Not with Days, since the page itself is missing, as if it had been forgotten without users.
	stored, err := parseDays([]byte(c.Get(t.Context(), at(t, s).daysKey(bucket, page)).Val()))
	if err != nil {
		t.Fatal(err)
	}
	is := stored.list

	want.Trim(want.At() - keep)
	must, err := want.Days(0)
	if err != nil {
		t.Fatal(err)
	}

	for i, d := range must {
		if i >= len(is) {
			break
		}
		got := is[i]
		if i == len(must)-1 { // the running one
			got.Presence += got.Last * (d.Until - got.Until)
			got.Until = d.Until
		}
		off := got.Presence - d.Presence
		got.Presence = d.Presence
		if got != d || max(off, -off) > 60_000 {
			t.Errorf("day %d is %+v, off by %d ms, want %+v", i, is[i], off, d)
		}
	}

	if len(is) != len(must) || len(is) < 20 {
		t.Errorf("%d days, want %d", len(is), len(must))
	}

	left := c.TTL(t.Context(), at(t, s).daysKey(bucket, page)).Val()
	if left < keep*24*time.Hour || c.Exists(t.Context(), at(t, s).spareKey(bucket)).Val() > 0 {
		t.Errorf("the days expire in %s, or the spare key exists", left)
	}
}

// since returns users times ms between until and at, as far as that is in the day of at.
func since(area, until, at, users int64) int64 {
	const day = 24 * 60 * 60 * 1000
	if midnight := at - at%day; until < midnight {
		area, until = 0, midnight
	}
	return area + users*(at-until)
}

// A count that stays over midnights is part of all days in between, though no script ran in them.
func TestServerDaysWithoutAChange(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "local", Secret: "k"}, PageStats: time.Hour,
		PageDays: 400, Partitions: 1,
	})

	claims, err := s.Claim(t.Context(), "n", []int{0}, false)
	if err != nil {
		t.Fatal(err)
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

	key := at(t, s).pagePrefix(presence.Bucket("p", s.cfg.Buckets)) + "p"
	points := func() (list []minutes.Point) {
		t.Helper()
		now := time.Now()
		q, err := minutes.AskDays(4*24*time.Hour, 400, now)
		if err != nil {
			t.Fatal(err)
		}

		days, err := s.Days(t.Context(), "p", q.From/minutes.MinutesOfDay)
		if err != nil {
			t.Fatal(err)
		}

		counts, err := s.Counts(t.Context(), []string{"p"})
		if err != nil {
			t.Fatal(err)
		}

		return q.AnswerDays("p", days, counts[0].Users, now).Points
	}

	check := func(when string) {
		t.Helper()
		list := points()
		if n := len(list); n != 5 || list[2].PersonMinutes != 3*1440 || list[3].PersonMinutes != 3*1440 ||
			list[3].Avg != 3 || list[2].Max != 3 || list[0].Max != 0 {
			for _, p := range list {
				t.Errorf("%s: the point is %+v %+v", when, p, *p.OfDay)
			}
		}
	}

	set(3)
	older(t, server, key, 3*minutes.MinutesOfDay)
	check("before the next change")
	set(7)
	testkit.Eventually(t, "the minute that ended is written", func() bool {
		return server.Do(t, "EXISTS", at(t, s).daysKey(presence.Bucket("p", s.cfg.Buckets), "p")) == int64(1)
	})
	check("after it")
	if list := points(); list[4].Max != 7 {
		t.Errorf("the maximum of the running day is %d, want 7", list[4].Max)
	}

	older(t, server, key, 2) // as if the minute of this change had ended
	set(1)
	testkit.Eventually(t, "the day is begun", func() bool {
		list, err := s.Days(t.Context(), "p", 0)
		return err == nil && len(list) == 2 && list[0].Last == 3
	})

	check("the day is begun")
}

// A year of 10,000 pages takes 50 MB of Redis at most. The page at place n of the ranking has 1/n of the visitors.
func TestServerAYearOfPagesTakes50MB(t *testing.T) {
	const pages, days = 10_000, 400
	server := redistest.Start(t)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL()), PageStats: time.Hour, PageDays: days})
	c, err := s.known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	used := func() (n int64) {
		t.Helper()
		for line := range strings.Lines(c.Info(t.Context(), "memory").Val()) {
			if text, is := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); is {
				n, err = strconv.ParseInt(text, 10, 64)
			}
		}

		if err != nil || n == 0 {
			t.Fatal("the memory is not known", err)
		}

		return n
	}

	before, keys := used(), at(t, s)
	rnd := rand.New(rand.NewPCG(1, 2))
	for page := range pages {
		var past []byte
		last := int64(0)
		for day := range int64(days) {
			n := 3 + rnd.Int64N(2*int64(1_000_000/(page+1))+5)
			past = minutes.AppendPast(past, last, minutes.Day{
				At: 20_000 + day, Max: n/20 + 1, Presence: n * 180_000, Joins: n, Visitors: n * 2 / 3,
			})
			last = 20_000 + day
		}

		name := "/articles/" + strconv.Itoa(page)
		key := keys.daysKey(presence.Bucket(name, s.cfg.Buckets), name)
		if err := c.Set(t.Context(), key, string(make([]byte, dayHead))+string(past), time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
	}

	is := used() - before
	t.Logf("%.1f MB, %.1f bytes a day", float64(is)/1e6, float64(is)/pages/days)
	if is > 50e6 {
		t.Errorf("a year of days takes %d bytes, want 50e6 at most", is)
	}
}

// A process of an older release carries the area of a page along, so after midnight its area is still that of the day
// before.
func TestServerDaysBesideAnOlderRelease(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "us", Secret: "k"}, PageStats: time.Hour,
		PageDays: 400, Partitions: 1, Peers: []string{"eu"},
	})

	claims, err := s.Claim(t.Context(), "n", []int{0}, false)
	if err != nil {
		t.Fatal(err)
	}

	b := presence.Bucket("p", s.cfg.Buckets)
	key := at(t, s).pagePrefix(b) + "p"
	set := func(users int64) {
		t.Helper()
		change := presence.Change{
			Claim: claims[0], Sequence: uint64(time.Now().UnixNano()), Complete: true,
			Counts: []presence.PageUsers{{Page: "p", Users: users}},
		}

		if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}

	today := func() time.Duration {
		t.Helper()
		days, err := s.Days(t.Context(), "p", 0)
		if err != nil || len(days) == 0 {
			t.Fatal(days, err)
		}

		return time.Duration(days[len(days)-1].Presence) * time.Millisecond
	}

	area := func(day int64, millis int64, pairs string) {
		t.Helper()
		text := server.Do(t, "GET", key).(string)
		n := len(text) - 26
		if len(pairs) > 0 {
			head := []byte(text[:n])
			binary.BigEndian.PutUint16(head[40:], uint16(26+len(pairs)))
			text = string(head)
		}
		server.Do(t, "SET", key, text[:n]+fmt.Sprintf("_ 0 %05d %015d;", day, millis)+pairs)
	}

	day := minutes.DayOf(time.Now())

	set(5)
	area(day-1, 900_000_000, "")
	set(6)
	if is := today(); is > time.Minute {
		t.Errorf("the area of yesterday was added to today: %s", is)
	}

	area(day, 900_000_000, "")
	set(7)
	if is := today(); is < 900_000*time.Second {
		t.Errorf("the area of today was lost: %s", is)
	}

	area(day, 950_000_000, "eu 1700000000000 4 1;") // the pair follows the area, as in the older release
	set(8)
	if is := today(); is < 950_000*time.Second {
		t.Errorf("the area in front of a pair was lost: %s", is)
	}
}

// A page that everybody has left is forgotten after a while. Its minutes and days still say that nobody is there since.
func TestServerNobodyIsOnAPageThatIsForgotten(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Config{
		Conn: redistest.Dial(t, server.URL()), Facts: Facts{Region: "local", Secret: "k"}, PageStats: time.Hour,
		PageDays: 400, Partitions: 1, RememberFor: time.Second,
	})

	claims, err := s.Claim(t.Context(), "n", []int{0}, false)
	if err != nil {
		t.Fatal(err)
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

	bucket := presence.Bucket("p", s.cfg.Buckets)
	key := at(t, s).pagePrefix(bucket) + "p"
	set(3)
	older(t, server, key, 2)
	set(0)
	testkit.Eventually(t, "the day is written, and the page is forgotten", func() bool {
		day := server.Do(t, "EXISTS", at(t, s).daysKey(bucket, "p"))
		return day == int64(1) && server.Do(t, "EXISTS", key) == int64(0)
	})

	days, err := s.Days(t.Context(), "p", 0)
	if err != nil {
		t.Fatal(err)
	}
	if last := days[len(days)-1]; last.Last != 0 || last.Max != 3 || last.PersonMinutes() < 5 {
		t.Errorf("the last day is %+v, want 3 users for two minutes and more, and then nobody", last)
	}

	list, err := s.Minutes(t.Context(), "p", minutes.Of(time.Now())-30)
	if err != nil {
		t.Fatal(err)
	}
	if last := list[len(list)-1]; last.Last != 0 || last.Max != 3 || len(list) < 2 {
		t.Errorf("the last of %d minutes is %+v, want 3 users and then nobody", len(list), last)
	}
}

// TestServerAMinuteIsReportedTwice: the last user leaves a page, which is reported at once, and others come in the same
// minute. Its two reports are one minute, whatever order they come in.
func TestServerAMinuteIsReportedTwice(t *testing.T) {
	const day = 20_000
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), PageStats: time.Hour, PageDays: 10})
	c, err := s.known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	report := func(minute, most, users, area uint64) func(page string) {
		entry := binary.BigEndian.AppendUint32(nil, uint32(day*minutes.MinutesOfDay+minute))
		entry = appendNumber(appendNumber(appendNumber(entry, most, 5), users, 5), area, 7)
		return func(page string) {
			t.Helper()
			b := presence.Bucket(page, s.cfg.Buckets)
			run := s.minutes.countsPart([]endedMinute{{b, page, string(entry)}}).scriptRun
			if err := s.conn.Run(t.Context(), []*scriptRun{run}); err != nil {
				t.Fatal(err)
			}
		}
	}
	first, left, ended := report(5, 1, 1, 30_000), report(7, 1, 0, 100_000), report(7, 4, 3, 130_000)

	for page, order := range map[string][]func(page string){
		"in order": {first, left, ended},
		"swapped":  {first, ended, left},
		"repeated": {first, left, left, ended, ended},
	} {
		for _, report := range order {
			report(page)
		}

		b := presence.Bucket(page, s.cfg.Buckets)
		days, err := parseDays([]byte(c.Get(t.Context(), at(t, s).daysKey(b, page)).Val()))
		if err != nil {
			t.Fatal(err)
		}
		d := days.list[len(days.list)-1]
		want := minutes.Day{At: day, Max: 4, Presence: 130_000, Last: 3}
		want.Until = (day*minutes.MinutesOfDay + 8) * 60_000
		if d != want {
			t.Errorf("%s: the day is %+v, want %+v", page, d, want)
		}

		text := c.Get(t.Context(), at(t, s).minutesKey(b, page)).Val()
		list, err := countedMinutes([]any{int64(1), int64(0), int64(0), text}, 0)
		if last := list[len(list)-1]; err != nil || len(list) != 3 || last.Max != 4 || last.Last != 3 {
			t.Errorf("%s: the minutes are %+v, %v; want two, the last with 4 users and 3 at its end", page, list, err)
		}
	}
}

// TestDaysHaveWhoComesBackInTheMinute: the report of a minute in which the last user left is folded. Who comes in the
// rest of that minute is known by the page itself.
func TestDaysHaveWhoComesBackInTheMinute(t *testing.T) {
	const day, minute = 20_000, 20_000 * minutes.MinutesOfDay
	days := pageDays{area: 5_000, list: []minutes.Day{
		{At: day, Max: 1, Presence: 5_000, Until: (minute + 1) * 60_000},
	}}

	days.change(minute*60+30, 2, 2, 6_000)
	want := minutes.Day{At: day, Max: 2, Presence: 6_000, Until: (minute*60 + 31) * 1000, Last: 2}
	if d := days.list[0]; d != want {
		t.Errorf("the day is %+v, want %+v", d, want)
	}

	// A page that did not change since has nothing to add.
	days = pageDays{area: 5_000, list: []minutes.Day{want}}
	days.list[0].Until = (minute + 2) * 60_000
	before := days.list[0]
	days.change(minute*60+30, 9, 9, 6_000)
	if d := days.list[0]; d != before {
		t.Errorf("the day is %+v, want %+v", d, before)
	}
}

// TestServerAClockAheadEndsNoDay: the clock of one process is days ahead. Its arrivals count today, and the counts of
// the others go on.
func TestServerAClockAheadEndsNoDay(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), PageStats: time.Hour, PageDays: 10})
	c, err := s.known(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	now := minutes.Of(time.Now())
	today := now / minutes.MinutesOfDay
	b := presence.Bucket("ahead", s.cfg.Buckets)

	m := &s.minutes
	arrive := func(u presence.User, at int64) {
		t.Helper()
		key := visit{"ahead", at}
		m.mu.Lock()
		m.visits[key] = &minutes.Visits{}
		m.visits[key].Add(u)
		run := m.visitsPartLocked(b, []visit{key}).scriptRun
		delete(m.visits, key)
		m.mu.Unlock()
		if err := s.conn.Run(t.Context(), []*scriptRun{run}); err != nil {
			t.Fatal(err)
		}
	}

	arrive(1, now)
	arrive(2, now+3*minutes.MinutesOfDay)
	entry := binary.BigEndian.AppendUint32(nil, uint32(now))
	entry = appendNumber(appendNumber(appendNumber(entry, 5, 5), 4, 5), 60_000, 7)
	counts := m.countsPart([]endedMinute{{b, "ahead", string(entry)}}).scriptRun
	if err := s.conn.Run(t.Context(), []*scriptRun{counts}); err != nil {
		t.Fatal(err)
	}

	days, err := parseDays([]byte(c.Get(t.Context(), at(t, s).daysKey(b, "ahead")).Val()))
	if err != nil {
		t.Fatal(err)
	}
	want := minutes.Day{
		At: today, Max: 5, Presence: 60_000, Until: (now + 1) * 60_000, Last: 4, Joins: 2, Visitors: 1,
	}
	if len(days.list) != 1 || days.list[0] != want {
		t.Errorf("the days are %+v, want %+v", days.list, want)
	}
}
