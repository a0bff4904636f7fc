package notifier

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/unread"
)

// busyStore is a store in which other goroutines do something before and after each read.
type busyStore struct {
	unread.Store
	meanwhile func()
}

func (s *busyStore) Levels(ctx context.Context, u unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Levels(ctx, u, pages)
}

func (s *busyStore) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Authors(ctx, page, since, users)
}

func (s *busyStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Records(ctx, users)
}

// wants is a Hub that counts how often each topic is wanted.
type wants map[presence.Topic]int

func (w wants) Want(t presence.Topic) (presence.Update, bool) {
	w[t]++
	return presence.Update{}, false
}

func (w wants) Unwant(t presence.Topic) { w[t]-- }

func quiet(store unread.Store) *Sums {
	return New(Config{Store: store, Hub: wants{}, Group: &sync.WaitGroup{}, Log: zerolog.Nop()})
}

// inline runs a function at once.
type inline struct{}

func (inline) Go(f func()) { f() }

// TestSumsFollowTheStore: publications come late, twice, in any order, or not at all except for the last one. The store
// loses its data or its last data, also during a read. Meanwhile users come and go, and others change everything. At
// rest the sums are those of the store. Of no page fewer than 0 changes are ever unread, or more than were unread in
// the store at some moment since its last loss before it had the user's follow.
func TestSumsFollowTheStore(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := newLosingStore()
		users := []unread.User{{1}, {2}, {3}}
		pages := []string{"p", "q", "r"}
		outside := unread.NewFollowService(store)
		hub := lingers{wants{}, map[presence.Topic]presence.Update{}}
		var waiting []presence.Update

		must := func(err error) {
			if err != nil {
				rt.Fatal(err)
			}
		}

		published := func(topic presence.Topic) {
			var u presence.Update
			if user, ok := unread.UserOf(presence.Update{Topic: topic}); ok {
				records, err := store.Records(t.Context(), []unread.User{user})
				must(err)
				u = records[0].Update(user)
			} else {
				l, _, err := store.Authors(t.Context(), topic.Name(), 0, nil)
				must(err)
				u = l.Update(topic.Name())
			}

			hub.publish(u)
			waiting = append(waiting, u)
		}

		var s *Sums
		here := map[unread.User]*Sum{}
		check := func() {
			for u, f := range here {
				for page, fo := range f.follows {
					most := store.most(u, fo.stored)
					if fo.count < 0 || fo.count > most {
						rt.Fatalf("user %x has %d unread changes of %s, want 0 to %d", u[0], fo.count, page, most)
					}
				}
			}
		}

		isLost := false     // and not repaired yet
		noticed := true     // by the gateway
		running := false    // catchUp
		notices := func() { // also when there was no loss
			if !isLost && !noticed {
				noticed = true
				s.StoreBack()
			}
		}

		act := func() {
			u, page := rapid.SampledFrom(users).Draw(rt, "user"), rapid.SampledFrom(pages).Draw(rt, "page")
			switch rapid.SampledFrom([]string{
				"change", "own", "own", "follow", "follow", "unfollow", "reset", "reset page",
				"lose all", "lose", "repair",
			}).Draw(rt, "act") {
			case "change":
				must(store.Change(t.Context(), page, unread.Change{}))
				published(unread.LevelTopic(page))
			case "own":
				must(store.Change(t.Context(), page, unread.Change{By: &u}))
				published(unread.LevelTopic(page))
			case "follow":
				must(outside.Follow(t.Context(), u, page))
				published(unread.RecordTopic(u))
			case "unfollow":
				must(outside.Unfollow(t.Context(), u, page))
				published(unread.RecordTopic(u))
			case "reset":
				_, err := outside.Reset(t.Context(), u)
				must(err)
				published(unread.RecordTopic(u))
			case "reset page":
				_, err := outside.Reset(t.Context(), u, page)
				must(err)
				published(unread.RecordTopic(u))
			case "lose all":
				store.lose(0)
				isLost, noticed = true, false
			case "lose":
				store.lose(rapid.IntRange(0, len(store.writes)).Draw(rt, "left"))
				store.repair() // before that it would accept no read
				isLost, noticed = false, false
			case "repair":
				store.repair()
				isLost, noticed = false, false
			}
			store.remember(pages, users)
		}

		deliver := func() {
			if len(waiting) == 0 {
				return
			}

			i := rapid.IntRange(0, len(waiting)-1).Draw(rt, "which")
			s.Update(waiting[i])
			if rapid.Bool().Draw(rt, "lost or late") {
				waiting = append(waiting[:i], waiting[i+1:]...)
			}
		}

		catchUp := func() {
			if running { // there is one goroutine for it
				return
			}

			running = true
			must(s.catchUp(t.Context()))
			running = false
		}

		move := func(ctx context.Context) {
			u := rapid.SampledFrom(users).Draw(rt, "who")
			if f := here[u]; f != nil {
				delete(here, u)
				s.Leave(f, nil)
				return
			}

			f := s.Enter(ctx, u)
			if here[u] == nil {
				here[u] = f
				s.Add(f, watcher{check})
			} else { // another follower entered for this user during the read
				s.Leave(f, nil)
			}
		}

		// read does what the end of a reset does, which runs in a goroutine of its own.
		read := func() {
			u := rapid.SampledFrom(users).Draw(rt, "who")
			f := here[u]
			if f == nil {
				return
			}

			states, err := s.followService.Read(t.Context(), u)
			must(err)
			s.mu.Lock()
			s.replace(f, states[0])
			s.mu.Unlock()
		}

		gone, cancel := context.WithCancel(t.Context())
		cancel()

		depth := 0 // how many reads are under way within one another
		s = quiet(&busyStore{store, func() {
			// An action during a read may read as well, but not without end.
			if depth == 2 {
				return
			}

			depth++
			switch rapid.IntRange(0, 7).Draw(rt, "meanwhile") {
			case 0:
				act()
			case 1:
				act()
				deliver()
			case 2:
				move(gone) // a user who comes during a read does not wait for the next one
			case 3:
				read()
			case 4:
				notices()
			case 5:
				catchUp()
			}

			check()
			depth--
		}})
		s.cfg.Hub = hub
		// Background work ends within the step that began it.
		s.cfg.Group = inline{}

		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 7).Draw(rt, "step") {
			case 0:
				move(t.Context())
			case 1, 2, 3:
				act()
			case 4, 5:
				deliver()
			case 6:
				notices()
				catchUp()
			case 7:
				read()
			}
			check()
		}

		// All is quiet, and the newest publication of each topic arrives.
		depth = 2
		if isLost {
			store.repair()
			store.remember(pages, users)
			isLost = false
		}
		notices()
		for _, u := range users {
			published(unread.RecordTopic(u))
		}
		for _, page := range pages {
			published(unread.LevelTopic(page))
		}
		for _, u := range waiting {
			s.Update(u)
		}

		catchUp()
		for _, p := range s.pages { // the pauses after questions in vain end
			s.askLocked(p)
		}
		catchUp()
		check()
		for _, u := range users {
			f := here[u]
			if f == nil {
				continue
			}

			want, _, err := outside.Unread(t.Context(), u)
			must(err)
			if !f.known || f.sum != want {
				rt.Fatalf("user %x has the sum %d (known: %v), want %d", u[0], f.sum, f.known, want)
			}
		}

		for _, f := range here {
			s.Leave(f, nil)
		}

		if len(s.users)+len(s.pages)+len(s.staleUsers)+len(s.stalePages) != 0 {
			rt.Fatalf("%d users and %d pages are left, want none", len(s.users), len(s.pages))
		}

		for topic, n := range hub.wants {
			if n != 0 {
				rt.Fatalf("the topic %[2]q is still wanted %[1]d times, want none", n, topic)
			}
		}
	})
}

// awayStore is a store that is away while away is set.
type awayStore struct {
	unread.Store
	away bool
}

func (s *awayStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	if s.away {
		return nil, fmt.Errorf("test: %w", presence.ErrUnavailable)
	}
	return s.Store.Records(ctx, users)
}

// While the store is away no user gets 0, and unknown numbers are read later.
func TestUnreadIsNotKnownWhileTheStoreIsAway(t *testing.T) {
	store := &awayStore{Store: presencemem.New(presencemem.Config{}), away: true}
	s := quiet(store)
	f := s.Enter(t.Context(), unread.User{1})
	if _, known := s.Unread(f); known {
		t.Error("an unread number is known that could not be read")
	}

	if err := s.catchUp(t.Context()); err == nil {
		t.Error("catchUp of a store that is away returns no error")
	}

	store.away = false
	if err := s.catchUp(t.Context()); err != nil {
		t.Error(err)
	}

	if n, known := s.Unread(f); n != 0 || !known {
		t.Errorf("%d are unread, known: %v; want 0, known", n, known)
	}

	s.Leave(f, nil)
}

// Users who come while the store reads others are read together, so that a slot of newcomers does not wait for one call
// each.
func TestNewcomersAreReadTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		slow := make(chan struct{})
		store := &busyStore{Store: presencemem.New(presencemem.Config{})}
		store.meanwhile = func() {
			reads++ // without a lock: there is one read at a time, and the race detector checks that
			<-slow
		}

		s := quiet(store)
		var entered sync.WaitGroup
		const users = 100
		for i := range users {
			entered.Go(func() {
				if _, known := s.Unread(s.Enter(t.Context(), unread.User{byte(i)})); !known {
					t.Errorf("user %d: the count is not known", i)
				}
			})
		}

		synctest.Wait()
		close(slow)
		entered.Wait()

		if want := 2 * 2; reads != want { // the function runs before and after each read
			t.Errorf("%d calls around the reads of %d users, want %d", reads, users, want)
		}
	})
}

// A connection waits only a moment for a slow store, and gets its number later.
func TestSlowStoreHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := make(chan struct{})
		s := quiet(&busyStore{Store: presencemem.New(presencemem.Config{}), meanwhile: func() { <-slow }})
		began := time.Now()

		var entered sync.WaitGroup
		for i := range 3 { // the first one reads, and the others are gathered
			entered.Go(func() {
				s.Enter(t.Context(), unread.User{byte(i)})
			})
		}

		time.Sleep(enterTimeout)
		synctest.Wait()

		s.mu.Lock()
		waiting := len(s.staleUsers)
		s.mu.Unlock()
		if waiting != 2 {
			t.Errorf("%d connections have stopped waiting after %s, want the two gathered ones",
				waiting, time.Since(began))
		}

		close(slow)
		entered.Wait()
	})
}

// askedStore counts the reads of authors. After a hundred of them it is away, so that a loop of reads ends.
type askedStore struct {
	unread.Store
	asked int
}

func (s *askedStore) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	s.asked++
	if s.asked > 100 {
		return unread.Level{}, nil, fmt.Errorf("test: %w", presence.ErrUnavailable)
	}
	return s.Store.Authors(ctx, page, since, users)
}

// A change has arrived, but the store has lost it before its author was read, as a Redis that comes back older or
// empty. The store is asked for it with growing pauses. As soon as the store has as many changes again, its number is
// used.
func TestALostChangeIsAskedForWithPauses(t *testing.T) {
	nothing := func(*askedStore) error { return nil }
	empty := func(s *askedStore) error {
		s.Store = presencemem.New(presencemem.Config{})
		return nil
	}
	another := func(s *askedStore) error { return s.Change(t.Context(), "p", unread.Change{}) }

	t.Run("the newest", func(t *testing.T) { aLostChangeIsAskedForWithPauses(t, nothing, 1) })
	t.Run("all", func(t *testing.T) { aLostChangeIsAskedForWithPauses(t, empty, 1) })
	t.Run("the newest, and another one is in its place", func(t *testing.T) {
		aLostChangeIsAskedForWithPauses(t, another, 2)
	})
}

func aLostChangeIsAskedForWithPauses(t *testing.T, lose func(*askedStore) error, left int64) {
	synctest.Test(t, func(t *testing.T) {
		store := &askedStore{Store: presencemem.New(presencemem.Config{})}
		s := quiet(store)
		u := unread.User{1}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		must(s.followService.Follow(t.Context(), u, "p"))
		must(store.Change(t.Context(), "p", unread.Change{By: &unread.User{2}}))
		f := s.Enter(t.Context(), u)

		ctx, end := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })

		levels, _, err := store.Levels(t.Context(), u, []string{"p"})
		must(err)
		lost := levels[0]
		lost.All++
		lost.By++
		must(lose(store))
		for range 3 { // a publication may come more than once
			s.Update(lost.Update("p"))
		}

		time.Sleep(10 * time.Second)
		synctest.Wait()
		if store.asked < 5 || store.asked > 20 {
			t.Errorf("the store was asked %d times in 10 s, want 5 to 20", store.asked)
		}
		if n, known := s.Unread(f); n != left || !known {
			t.Errorf("%d are unread (known: %t), want %d", n, known, left)
		}

		for range 3 {
			must(store.Change(t.Context(), "p", unread.Change{By: &unread.User{2}}))
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()

		levels, _, err = store.Levels(t.Context(), u, []string{"p"})
		must(err)
		if n, _ := s.Unread(f); n != levels[0].All {
			t.Errorf("%d are unread, want %d", n, levels[0].All)
		}

		s.Leave(f, nil)
		end()
		running.Wait()
	})
}

// remembers is a Hub that has an update of each wanted topic.
type remembers struct{ newest presence.Update }

func (r *remembers) Want(presence.Topic) (presence.Update, bool) { return r.newest, true }
func (r *remembers) Unwant(presence.Topic)                       {}

// The gateway still has the level of a page from before its store lost everything, because another user follows the
// page or the hub knows the level; or it receives that level late. For a user who follows the page after the loss, the
// changes of before are not unread.
func TestAFollowAfterALoss(t *testing.T) {
	t.Run("of a page that others follow", func(t *testing.T) { aFollowAfterALoss(t, "others") })
	t.Run("of a page that the hub knows", func(t *testing.T) { aFollowAfterALoss(t, "hub") })
	t.Run("of a page whose level comes late", func(t *testing.T) { aFollowAfterALoss(t, "late") })
}

func aFollowAfterALoss(t *testing.T, by string) {
	synctest.Test(t, func(t *testing.T) {
		store := &struct{ unread.Store }{presencemem.New(presencemem.Config{})}
		hub := &remembers{}
		s := New(Config{Store: store, Hub: hub, Group: &sync.WaitGroup{}, Log: zerolog.Nop()})
		early, late := unread.User{1}, unread.User{2}
		c := &tab{}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		wants := func(received ...int64) {
			t.Helper()
			must(s.catchUp(t.Context()))
			if !slices.Equal(c.received, received) {
				t.Errorf("the user received the numbers %d, want %d", c.received, received)
			}
		}

		must(s.followService.Follow(t.Context(), early, "p"))
		must(store.Change(t.Context(), "p", unread.Change{}))
		if by == "others" {
			s.Enter(t.Context(), early)
		}
		s.Add(s.Enter(t.Context(), late), c)
		levels, _, err := store.Levels(t.Context(), late, []string{"p"})
		must(err)
		before := levels[0].Update("p")
		if by != "late" {
			hub.newest = before
		}

		time.Sleep(time.Second) // a store assigns incarnations by its clock
		store.Store = presencemem.New(presencemem.Config{})
		must(s.followService.Follow(t.Context(), late, "p"))
		records, err := store.Records(t.Context(), []unread.User{late})
		must(err)
		s.Update(records[0].Update(late))
		wants(0)
		s.Update(before)
		wants(0)

		must(store.Change(t.Context(), "p", unread.Change{}))
		levels, _, err = store.Levels(t.Context(), late, []string{"p"})
		must(err)
		s.Update(levels[0].Update("p"))
		wants(0, 1)
	})
}

// TestOwnChangesAfterALoss: a gateway asks for the authors of a change, and the store, which has lost data meanwhile,
// answers with a level of another incarnation. The user's own changes in that one are not unread.
func TestOwnChangesAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := unread.User{1}
		store := &struct{ unread.Store }{}
		s := quiet(store)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		// begin makes a store in which the user follows a page, and has changed it.
		begin := func(changes int) unread.Level {
			store.Store = presencemem.New(presencemem.Config{})
			must(s.followService.Follow(t.Context(), u, "p"))
			for range changes {
				must(store.Change(t.Context(), "p", unread.Change{By: &u}))
			}
			levels, _, err := store.Levels(t.Context(), u, []string{"p"})
			must(err)

			return levels[0]
		}

		level := begin(3)
		c := &tab{}
		s.Add(s.Enter(t.Context(), u), c)
		level.All++
		level.By++
		s.Update(level.Update("p"))

		time.Sleep(time.Second) // a store assigns incarnations by its clock
		begin(2)
		must(s.catchUp(t.Context()))
		if !slices.Equal(c.received, []int64{0}) {
			t.Errorf("the user received the numbers %d, want 0 once", c.received)
		}
	})
}

// TestAUserWhoComesDuringAQuestion: while a gateway asks for the authors of a change, a user enters who follows the
// page and changes it just then. The answer leaves this user out, and the user's own change is not unread.
func TestAUserWhoComesDuringAQuestion(t *testing.T) {
	t.Run("of a store that loses nothing", func(t *testing.T) { aUserWhoComesDuringAQuestion(t, false) })
	t.Run("of a store that loses its data", func(t *testing.T) { aUserWhoComesDuringAQuestion(t, true) })
}

func aUserWhoComesDuringAQuestion(t *testing.T, isLost bool) {
	synctest.Test(t, func(t *testing.T) {
		early, late, other := unread.User{1}, unread.User{2}, unread.User{3}
		store := &busyStore{meanwhile: func() {}}
		s := quiet(store)
		c := &tab{}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		begin := func() {
			store.Store = presencemem.New(presencemem.Config{})
			must(s.followService.Follow(t.Context(), early, "p"))
			must(s.followService.Follow(t.Context(), late, "p"))
		}

		begin()
		s.Enter(t.Context(), early)
		must(store.Change(t.Context(), "p", unread.Change{By: &other}))
		levels, _, err := store.Levels(t.Context(), early, []string{"p"})
		must(err)
		s.Update(levels[0].Update("p"))

		store.meanwhile = func() {
			store.meanwhile = func() {}
			s.Add(s.Enter(t.Context(), late), c)
			if isLost {
				time.Sleep(time.Second) // a store assigns incarnations by its clock
				begin()
				must(store.Change(t.Context(), "p", unread.Change{By: &other}))
			}
			must(store.Change(t.Context(), "p", unread.Change{By: &late}))
		}
		must(s.catchUp(t.Context()))
		if !slices.Equal(c.received, []int64{1}) {
			t.Errorf("the user received the numbers %d, want 1 once", c.received)
		}
	})
}

// TestARecordThatIsReadLate: a tab reads a user's record, and before it has the answer the gateway has read a newer
// one. One of the two does not exist, so their versions do not say which is newer.
func TestARecordThatIsReadLate(t *testing.T) {
	t.Run("from before the first follow", func(t *testing.T) { aRecordThatIsReadLate(t, false) })
	t.Run("from before a loss", func(t *testing.T) { aRecordThatIsReadLate(t, true) })
}

func aRecordThatIsReadLate(t *testing.T, isLost bool) {
	synctest.Test(t, func(t *testing.T) {
		u := unread.User{1}
		store := &busyStore{Store: presencemem.New(presencemem.Config{}), meanwhile: func() {}}
		s := quiet(store)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		if isLost {
			must(s.followService.Follow(t.Context(), u, "p"))
		}

		reads := 0
		store.meanwhile = func() {
			reads++
			if reads != 2 { // the record has just been read
				return
			}

			if isLost {
				time.Sleep(time.Millisecond) // a store assigns incarnations by its clock
				store.Store = presencemem.New(presencemem.Config{})
			} else {
				must(s.followService.Follow(t.Context(), u, "p"))
			}
			s.StoreBack()
			must(s.catchUp(t.Context()))
		}

		c := &tab{}
		s.Add(s.Enter(t.Context(), u), c)
		must(s.catchUp(t.Context()))
		must(store.Change(t.Context(), "p", unread.Change{}))
		levels, _, err := store.Levels(t.Context(), u, []string{"p"})
		must(err)
		s.Update(levels[0].Update("p"))
		must(s.catchUp(t.Context()))

		want, _, err := s.followService.Unread(t.Context(), u)
		must(err)
		if n := c.received[len(c.received)-1]; n != want {
			t.Errorf("the user received the numbers %d, want %d at last", c.received, want)
		}
	})
}

// tab is a connection.
type tab struct{ received []int64 }

func (c *tab) SendUnread(n int64, _ bool) { c.received = append(c.received, n) }

// A read message is about its page. Those that come within the pause are one reset, and a message about all pages
// includes all.
func TestReadOfPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := presencemem.New(presencemem.Config{})
		var group sync.WaitGroup
		s := New(Config{Store: store, Hub: wants{}, Group: &group, Rest: time.Second, Log: zerolog.Nop()})
		u := unread.User{1}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		for _, page := range []string{"p", "q", "r", "s"} {
			must(s.followService.Follow(t.Context(), u, page))
			must(store.Change(t.Context(), page, unread.Change{}))
		}

		f, c := s.Enter(t.Context(), u), &tab{}
		s.Add(f, c)

		read := func(want int64, pages ...string) {
			t.Helper()
			for _, page := range pages {
				s.Read(f, c, page)
			}

			group.Wait()
			if n, _ := s.Unread(f); n != want || c.received[len(c.received)-1] != want {
				t.Errorf("after a read of %q: %d are unread, and the user received %d; want %d",
					pages, n, c.received, want)
			}
		}

		read(4, "not followed")
		read(3, "p")
		read(3, "p")
		read(1, "r", "q")
		read(0, "p", "")

		s.Read(f, c, "p")
		synctest.Wait() // until the resetting goroutine has taken this page, and pauses

		// If a user reads more pages than one reset takes, the others stay unread.
		for i := range maxPages + 50 {
			s.Read(f, c, fmt.Sprintf("page %d", i))
		}

		s.mu.Lock()
		n := len(f.reset.pages)
		s.mu.Unlock()
		if n != maxPages {
			t.Errorf("%d pages wait, want %d", n, maxPages)
		}

		group.Wait()
	})
}

// A user who reads a page and closes the tab at once has read it, even if another reset was just made.
func TestAReadBeforeTheEndOfItsConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := presencemem.New(presencemem.Config{})
		var group sync.WaitGroup
		s := New(Config{Store: store, Hub: wants{}, Group: &group, Rest: time.Second, Log: zerolog.Nop()})
		u := unread.User{1}
		for _, page := range []string{"p", "q"} {
			err := s.followService.Follow(t.Context(), u, page)
			if err == nil {
				err = store.Change(t.Context(), page, unread.Change{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}

		f, c := s.Enter(t.Context(), u), &tab{}
		s.Add(f, c)
		s.Read(f, c, "p")
		synctest.Wait() // until the resetting goroutine pauses
		s.Read(f, c, "q")
		s.Leave(f, c)
		group.Wait()

		if n, _, err := s.followService.Unread(t.Context(), u); n != 0 || err != nil {
			t.Errorf("%d are unread, %v; want 0", n, err)
		}
	})
}
