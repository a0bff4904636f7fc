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
		w := newFollowing(t.Context(), rt)
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			w.step()
			w.check()
		}

		w.settle()
		w.checkSums()
		w.leaveAll()
	})
}

// following is the world of TestSumsFollowTheStore: a store, the sums of a gateway, and all that happens to them.
type following struct {
	*rapid.T
	ctx     context.Context
	users   []unread.User
	pages   []string
	store   *losingStore
	outside *unread.FollowService // follows and resets by other processes
	hub     lingers
	waiting []presence.Update // publications that may still arrive
	sums    *Sums
	here    map[unread.User]*Sum // the users with a connection

	isLost  bool // the store has lost its data, and is not repaired yet
	noticed bool // by the gateway
	running bool // catchUp
	depth   int  // how many reads are under way within one another
}

func newFollowing(ctx context.Context, t *rapid.T) *following {
	w := &following{
		T:       t,
		ctx:     ctx,
		users:   []unread.User{{1}, {2}, {3}},
		pages:   []string{"p", "q", "r"},
		store:   newLosingStore(),
		hub:     lingers{wants{}, map[presence.Topic]presence.Update{}},
		here:    map[unread.User]*Sum{},
		noticed: true,
	}
	w.outside = unread.NewFollowService(w.store)
	w.sums = quiet(&busyStore{w.store, w.duringARead})
	w.sums.cfg.Hub = w.hub
	// Background work ends within the step that began it.
	w.sums.cfg.Group = inline{}

	return w
}

func (w *following) must(err error) {
	if err != nil {
		w.Fatal(err)
	}
}

// step does one thing after another, while no read is under way.
func (w *following) step() {
	switch rapid.IntRange(0, 7).Draw(w.T, "step") {
	case 0:
		w.move(w.ctx)
	case 1, 2, 3:
		w.act()
	case 4, 5:
		w.deliver()
	case 6:
		w.notices()
		w.catchUp()
	case 7:
		w.read()
	}
}

// duringARead does what other goroutines may do before and after a read of the store. What was read is then older than
// what the gateway knows, which is where sums go wrong.
func (w *following) duringARead() {
	// An action during a read may read as well, but not without end.
	if w.depth == 2 {
		return
	}

	w.depth++
	switch rapid.IntRange(0, 7).Draw(w.T, "meanwhile") {
	case 0:
		w.act()
	case 1:
		w.act()
		w.deliver()
	case 2:
		gone, cancel := context.WithCancel(w.ctx)
		cancel()
		w.move(gone) // a user who comes during a read does not wait for the next one
	case 3:
		w.read()
	case 4:
		w.notices()
	case 5:
		w.catchUp()
	}

	w.check()
	w.depth--
}

// act changes something in the store, as other processes do.
func (w *following) act() {
	u := rapid.SampledFrom(w.users).Draw(w.T, "user")
	page := rapid.SampledFrom(w.pages).Draw(w.T, "page")
	switch rapid.SampledFrom([]string{
		"change", "own", "own", "follow", "follow", "unfollow", "reset", "reset page",
		"lose all", "lose", "repair",
	}).Draw(w.T, "act") {
	case "change":
		w.must(w.store.Change(w.ctx, page, unread.Change{}))
		w.published(unread.LevelTopic(page))
	case "own":
		w.must(w.store.Change(w.ctx, page, unread.Change{By: &u}))
		w.published(unread.LevelTopic(page))
	case "follow":
		w.must(w.outside.Follow(w.ctx, u, page))
		w.published(unread.RecordTopic(u))
	case "unfollow":
		w.must(w.outside.Unfollow(w.ctx, u, page))
		w.published(unread.RecordTopic(u))
	case "reset":
		_, err := w.outside.Reset(w.ctx, u)
		w.must(err)
		w.published(unread.RecordTopic(u))
	case "reset page":
		_, err := w.outside.Reset(w.ctx, u, page)
		w.must(err)
		w.published(unread.RecordTopic(u))
	case "lose all":
		w.store.lose(0)
		w.isLost = true
		w.noticed = false
	case "lose":
		w.store.lose(rapid.IntRange(0, len(w.store.writes)).Draw(w.T, "left"))
		w.store.repair() // before that it would accept no read
		w.isLost = false
		w.noticed = false
	case "repair":
		w.store.repair()
		w.isLost = false
		w.noticed = false
	}
	w.store.remember(w.pages, w.users)
}

// published publishes the present state of a topic.
func (w *following) published(topic presence.Topic) {
	var u presence.Update
	if user, ok := unread.UserOf(presence.Update{Topic: topic}); ok {
		records, err := w.store.Records(w.ctx, []unread.User{user})
		w.must(err)
		u = records[0].Update(user)
	} else {
		l, _, err := w.store.Authors(w.ctx, topic.Name(), 0, nil)
		w.must(err)
		u = l.Update(topic.Name())
	}

	w.hub.publish(u)
	w.waiting = append(w.waiting, u)
}

// deliver has one of the publications arrive, perhaps not for the last time.
func (w *following) deliver() {
	if len(w.waiting) == 0 {
		return
	}

	i := rapid.IntRange(0, len(w.waiting)-1).Draw(w.T, "which")
	w.sums.Update(w.waiting[i])
	if rapid.Bool().Draw(w.T, "lost or late") {
		w.waiting = append(w.waiting[:i], w.waiting[i+1:]...)
	}
}

// notices has the gateway notice that the store is back, also when there was no loss.
func (w *following) notices() {
	if !w.isLost && !w.noticed {
		w.noticed = true
		w.sums.StoreBack()
	}
}

func (w *following) catchUp() {
	if w.running { // there is one goroutine for it
		return
	}

	w.running = true
	w.must(w.sums.catchUp(w.ctx))
	w.running = false
}

// move has a user come or go.
func (w *following) move(ctx context.Context) {
	u := rapid.SampledFrom(w.users).Draw(w.T, "who")
	if f := w.here[u]; f != nil {
		delete(w.here, u)
		w.sums.Leave(f, nil)
		return
	}

	f := w.sums.Enter(ctx, u)
	if w.here[u] == nil {
		w.here[u] = f
		w.sums.Add(f, watcher{w.check})
	} else { // another follower entered for this user during the read
		w.sums.Leave(f, nil)
	}
}

// read does what the end of a reset does, which runs in a goroutine of its own.
func (w *following) read() {
	u := rapid.SampledFrom(w.users).Draw(w.T, "who")
	f := w.here[u]
	if f == nil {
		return
	}

	states, err := w.sums.followService.Read(w.ctx, u)
	w.must(err)
	w.sums.mu.Lock()
	w.sums.replace(f, states[0])
	w.sums.mu.Unlock()
}

// check checks what holds at every moment.
func (w *following) check() {
	for u, f := range w.here {
		for page, fo := range f.follows {
			most := w.store.most(u, fo.stored)
			if fo.count < 0 || fo.count > most {
				w.Fatalf("user %x has %d unread changes of %s, want 0 to %d", u[0], fo.count, page, most)
			}
		}
	}
}

// settle ends all losses, and has the newest publication of each topic arrive.
func (w *following) settle() {
	w.depth = 2 // nothing happens during reads any more
	if w.isLost {
		w.store.repair()
		w.store.remember(w.pages, w.users)
		w.isLost = false
	}
	w.notices()

	for _, u := range w.users {
		w.published(unread.RecordTopic(u))
	}
	for _, page := range w.pages {
		w.published(unread.LevelTopic(page))
	}
	for _, u := range w.waiting {
		w.sums.Update(u)
	}

	w.catchUp()
	for _, p := range w.sums.pages { // the pauses after questions in vain end
		w.sums.askLocked(p)
	}
	w.catchUp()
	w.check()
}

// checkSums compares the sums with what the store says to a reader.
func (w *following) checkSums() {
	for _, u := range w.users {
		f := w.here[u]
		if f == nil {
			continue
		}

		want, _, err := w.outside.Unread(w.ctx, u)
		w.must(err)
		if !f.known || f.sum != want {
			w.Fatalf("user %x has the sum %d (known: %v), want %d", u[0], f.sum, f.known, want)
		}
	}
}

// leaveAll has all users go, after which nothing of them may be left.
func (w *following) leaveAll() {
	for _, f := range w.here {
		w.sums.Leave(f, nil)
	}

	s := w.sums
	if len(s.users)+len(s.pages)+len(s.staleUsers)+len(s.stalePages) != 0 {
		w.Fatalf("%d users and %d pages are left, want none", len(s.users), len(s.pages))
	}

	for topic, n := range w.hub.wants {
		if n != 0 {
			w.Fatalf("the topic %[2]q is still wanted %[1]d times, want none", n, topic)
		}
	}
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

	// The error makes Run try again; without it the number would stay unknown.
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

		// The first user is being read, and all others are gathered for the next read.
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

		// The first connection still waits for its read, which ends with the store.
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
		// The level as it was published with one more change, before the store lost that one.
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

		// Now the store has more changes than were lost, so its number is right again.
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
		// The follow is of the new store, and the level that the gateway knows is of the old one. Compared with each
		// other, they make a change that nobody has made.
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
		// A change by another user has arrived, so the gateway asks for the authors.
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

		// The gateway has sent its question with the users that it knew. From here on it gets an answer that is not
		// about the newcomer.
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

		// The tab has the older record in its hand, and must not replace the newer one by it.
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
		// A page that is read already, as after a second click.
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
		// Nobody is left to whom the count would be sent, but the pages are read for all later visits.
		s.Leave(f, c)
		group.Wait()

		if n, _, err := s.followService.Unread(t.Context(), u); n != 0 || err != nil {
			t.Errorf("%d are unread, %v; want 0", n, err)
		}
	})
}
