package member

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"iter"
	stdlog "log"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/cryptotest"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/local"
	"headcount/counter/pipeline"
	"headcount/dispatcher"
	"headcount/gateway"
	"headcount/gateway/api"
	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
	"headcount/internal/marks"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/node"
	"headcount/presence/rpc"
	"headcount/presence/seal"
	"headcount/unread"
	"headcount/webhook"
	"headcount/webhook/webhookmem"
)

// The simulation runs a whole cluster in this process, with its own clock, network and store. Users come and go, and
// everything fails. Some invariants are checked all the time, and the others after every round. The seed decides what
// happens and when. The scheduler decides the order of simultaneous events, unless make replay decides that, too.

// defaultSeeds is smaller with the race detector, which makes a seed six times slower: those seeds look for races only.
func defaultSeeds() int {
	if testkit.Race {
		return 30
	}

	return 150
}

var (
	simSeed    = flag.Uint64("seed", 0, "replay the simulation of this seed, with its trace")
	simWithout = flag.String("without", "", "numbers of faults that the replay leaves out, as 1,4")
	simSeeds   = flag.Int("seeds", defaultSeeds(), "number of seeds to simulate")
	simFirst   = flag.Uint64("first", 1, "the first of these seeds")
	simAll     = flag.Bool("all-seeds", false, "go on after a seed that fails")
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		cryptotest.SetGlobalRandom(t, *simSeed)
		simulateSeed(t, *simSeed)
		return
	}

	first, n := *simFirst, *simSeeds
	if testing.Short() {
		n = min(n, 20)
	}

	next := make(chan uint64, n)
	for i := range n {
		next <- first + uint64(i)
	}
	close(next)

	var workers sync.WaitGroup

	// A simulation never waits for real time, so one worker per core keeps the machine busy.
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := range next {
				if t.Failed() && !*simAll {
					return
				}
				t.Run(fmt.Sprint(seed), func(t *testing.T) { simulateSeed(t, seed) })
			}
		})
	}
	workers.Wait()

	t.Logf("%d of %d numbers of notifications were known exactly", simExact.Load(), simJudged.Load())
	held, meant := simHeld.Load(), simMeant.Load()
	t.Logf("%d of %d users who stayed were held to be counted all the time", held, meant)
	if meant >= 1000 && 100*held < simShare*meant { // too few seeds say nothing about the share
		t.Errorf("%d of %d users who stay were checked all the time, want at least %d %%", held, meant, simShare)
	}
}

// simShare is the least share, in percent, of the users who stay that the simulation must check all the time, over all
// seeds. simMeant counts the users who stay, and simHeld those who were checked to the end.
const simShare = 70

var simHeld, simMeant atomic.Int64

func simulateSeed(t *testing.T, seed uint64) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seed, *simSeed != 0)
		s.run()
		marks.Simulated(time.Since(s.begun))
		if s.failure == "" {
			return
		}
		for _, line := range s.lines {
			t.Log(line)
		}
		t.Errorf("seed %d: %s\nreplay: make replay SIM=presence/member SEED=%d", seed, s.failure, seed)
	})
}

// moments yields the numbers below n, or with -short every third of them: moments of an interval at which something may
// happen.
func moments(n int) iter.Seq[int] {
	return func(yield func(int) bool) {
		step := 1
		if testing.Short() {
			step = 3
		}
		for i := 0; i < n && yield(i); i += step {
		}
	}
}

const (
	simPartitions = 7
	simBuckets    = 3
	simTimeout    = 7 * time.Second // presence-timeout, unless a test says otherwise
	simGrace      = 2 * time.Second // leave-grace
	simRounds     = 2
	simSkew       = time.Hour        // of a clock, at most, either way
	simQuiet      = 10 * time.Second // until every count must be exact
	simUsers      = 12
)

// simulation is the run of one seed. Only its driver, run, touches the fields that are not under mu.
type simulation struct {
	seed     uint64
	replay   bool
	timeout  time.Duration // presence-timeout
	chance   *rand.Rand
	begun    time.Time
	net      *network
	store    *sharedStore
	counters func() *pipeline.Counters // of all gateways; no simulation changes a counter
	crowd    *crowd
	readers  *readers
	pages    []string
	where    []string // names of the gateways
	alone    bool     // a single process with a store of its own and no network; its data ends with it

	members  []*member
	watchers []*user // one tab at each gateway, which receives all counts
	apps     []*app
	surfers  []*surfer
	receiver *receiver
	faults   []*fault // sorted by their ends
	made     int      // number of faults, including those that a replay leaves out
	history  []*fault
	// zombies says that a former owner may have overwritten data of the next one. Then holds that were ended may exist
	// again until they expire.
	zombies bool
	clients sync.WaitGroup // tabs, holds and drains
	tabs    int

	mu      sync.Mutex
	lines   []string
	failure string // the first invariant that was broken
	// apart says, by gateway, until when an owner may not know the gateway's users, because the link between the two is
	// cut.
	apart map[string]time.Time
	// cutOff says, by gateway, when its link to an owner was last cut for so long that the owner forgets its users.
	cutOff map[string]time.Time
}

// member is one process of the cluster, over all its lives.
type member struct {
	name  string
	roles []string
	facts string        // set for a process with other settings than the rest; empty: the same settings
	skew  time.Duration // of its clock
	*running
}

// running is one life of a member; nil while it has none.
type running struct {
	life    *life
	process *Member
	gateway *gateway.Gateway // nil without the role
	node    *node.Node       // nil without the role
	stop    func()           // ends all its goroutines and waits
	served  bool             // it has been ready once
	leaving bool             // the process was asked to leave
	left    chan struct{}    // closed when it has left
	refused chan error       // why a process with other settings ended
	frozen  bool
}

// look records that the member has been able to do its roles.
func (m *member) look() {
	if m.running != nil && !m.served {
		m.served = m.process.Ready() == nil
	}
}

// serves reports whether the member does the role, as far as the store permits.
func (m *member) serves(role string) bool {
	return slices.Contains(m.roles, role) && m.running != nil && m.served && !m.leaving && !m.frozen
}

func newSimulation(seed uint64, replay bool) *simulation {
	s := &simulation{
		seed: seed, replay: replay, timeout: simTimeout, chance: chance(seed, "driver"), begun: time.Now(),
		net: newNetwork(seed), pages: []string{"a", "b", "c"},
		apart: map[string]time.Time{}, cutOff: map[string]time.Time{},
	}

	s.crowd = &crowd{s: s, floor: map[string]int{}, ceiling: map[string]map[string]struct{}{}}
	s.readers = newReaders(s)
	s.receiver = newReceiver(s)
	s.counters = sync.OnceValue(func() *pipeline.Counters {
		rules := &counter.Rules{}
		return pipeline.New(local.InMemory(rules), rules, counter.CombinerConfig{Instant: true}, zerolog.Nop())
	})

	s.store = newSharedStore(simPartitions, simBuckets, s.broken, s.detail)

	add := func(prefix string, n int, roles ...string) {
		for i := range n {
			m := &member{name: fmt.Sprintf("%s%d:7946", prefix, i+1), roles: roles}
			s.members = append(s.members, m)
			if slices.Contains(roles, presence.RoleGateway) {
				s.where = append(s.where, m.name)
			}
		}
	}

	// The seed chooses one of four topologies. Only the first has a single process.
	switch s.chance.IntN(4) {
	case 3:
		add("local", 1, presence.RoleGateway, presence.RolePresence, presence.RoleDispatcher)
		s.alone = true
	case 0:
		add("all", 3, presence.RoleGateway, presence.RolePresence, presence.RoleDispatcher)
	case 1:
		add("gateway", 2, presence.RoleGateway)
		add("node", 2+s.chance.IntN(2), presence.RolePresence)
		add("dispatcher", 2, presence.RoleDispatcher)
	case 2:
		add("front", 2, presence.RoleGateway, presence.RoleDispatcher)
		add("node", 3, presence.RolePresence)
	}

	// In a third of the seeds the clocks of the processes differ. They have random numbers of their own, so that the
	// rest of the seed's history does not depend on them.
	clocks := chance(seed, "clocks")
	if clocks.IntN(3) == 0 {
		for _, m := range s.members {
			m.skew = time.Duration(clocks.Int64N(int64(2*simSkew))) - simSkew
		}
	}

	return s
}

// startAll starts every process, and waits until all can do their roles.
func (s *simulation) startAll() {
	for _, m := range s.members {
		s.start(m)
	}

	s.ready()
}

// newVisitor adds the user number n, with one tab at the gateway, on the given pages.
func (s *simulation) newVisitor(n int, gateway string, pages ...string) {
	u := newUser(fmt.Sprint("u", n))
	s.crowd.users = append(s.crowd.users, u)
	s.newTab(u, gateway, nil, pages...)
}

func (s *simulation) log(format string, args ...any) {
	line := fmt.Sprintf("%9.3f  ", time.Since(s.begun).Seconds()) + fmt.Sprintf(format, args...)

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.replay {
		fmt.Println(line) // printed at once, so that a panic loses nothing
		return
	}
	s.lines = append(s.lines, line)
}

// detail logs what is useful only in a replay.
func (s *simulation) detail(format string, args ...any) {
	if s.replay {
		s.log("  "+format, args...)
	}
}

// broken records that an invariant is broken, and the promise of docs/promises.md that it belongs to; "–" is none.
func (s *simulation) broken(promise, format string, args ...any) {
	text := promise + ": " + fmt.Sprintf(format, args...)
	s.log("BROKEN %s", text)

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure == "" {
		s.failure = fmt.Sprintf("after %.3f s: %s", time.Since(s.begun).Seconds(), text)
	}
}

// isApart reports whether an owner may not know the gateway's users because the link between the two is cut.
func (s *simulation) isApart(gateway string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !time.Now().After(s.apart[gateway])
}

// wasCutOff reports whether since then an owner may have forgotten the gateway's users, because their link was cut.
func (s *simulation) wasCutOff(gateway string, since time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.cutOff[gateway].After(since)
}

func (s *simulation) failed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure != ""
}

func (s *simulation) someGateway(r *rand.Rand) string { return s.where[r.IntN(len(s.where))] }

func (s *simulation) otherGateway(r *rand.Rand, than string) string {
	if len(s.where) == 1 {
		return than
	}

	// The offset is at least 1, so the result is not the gateway than.
	i := slices.Index(s.where, than)
	return s.where[(i+1+r.IntN(len(s.where)-1))%len(s.where)]
}

// watch adds one user at each of the gateways, who watches the pages.
func (s *simulation) watch(gateways, pages []string) {
	for _, gw := range gateways {
		u := newUser("watcher of " + gw)
		s.watchers = append(s.watchers, u)
		s.newTab(u, gw, pages)
	}
}

// run runs the simulation from start to end.
func (s *simulation) run() {
	defer s.end()
	s.startAll()
	s.watch(s.where, append([]string{presence.AllPages}, s.pages...))

	for i := range simUsers {
		u := newUser(fmt.Sprint("u", i))
		s.crowd.users = append(s.crowd.users, u)
		for range s.chance.IntN(3) {
			s.userActs(u)
		}
	}

	for i := range simApps {
		s.apps = append(s.apps, s.newApp(fmt.Sprint("app", i)))
	}
	s.surfers = append(s.surfers, s.newSurfer("surfer"))

	s.quiet(0)

	for round := 1; round <= simRounds && !s.failed(); round++ {
		s.round(round)
		s.quiet(round)
	}
	if !s.failed() {
		s.receiver.check()
	}
}

// round lets users act and faults happen.
func (s *simulation) round(n int) {
	var stayers []*user
	for _, u := range s.crowd.users {
		needed := len(u.tabs) > 0 && len(stayers) == 0 // somebody must stay, or the round proves nothing
		if len(u.pages()) > 0 && (s.chance.IntN(3) > 0 || needed) {
			stayers = append(stayers, u)
		}
	}
	s.crowd.begin(stayers)

	s.receiver.set(s.readers.chance.IntN(2) == 0)
	length := s.between(8*time.Second, 20*time.Second)
	s.log("round %d, for %s; %d of %d users stay", n, length, len(stayers), len(s.crowd.users))

	for end := time.Now().Add(length); time.Now().Before(end) && !s.failed(); {
		// There are four events a second on average, sometimes several at nearly the same moment.
		time.Sleep(time.Duration(s.chance.ExpFloat64() * float64(250*time.Millisecond)))
		s.healDue(time.Now())
		for _, m := range s.members {
			m.look()
		}

		if s.chance.IntN(8) == 0 && len(s.faults) < 3 {
			s.failOnce()
		} else {
			s.userActs(s.crowd.users[s.chance.IntN(len(s.crowd.users))])
		}
		s.readers.act()
		if n := s.readers.chance.IntN(6 * len(s.apps)); n < len(s.apps) {
			s.apps[n].act(s.readers.chance)
		}
		if s.readers.chance.IntN(5) == 0 {
			s.surfers[0].act(s.readers.chance)
		}
	}

	held, meant := s.crowd.held()
	// When a single process fails, its data about all users is lost. In a cluster, too, faults excuse everybody in some
	// rounds, so what counts is the share over all rounds.
	if !s.alone {
		simHeld.Add(int64(held))
		simMeant.Add(int64(meant))
	}

	s.log("everything is healed; %d of %d were held to stay", held, meant)
	s.receiver.set(false)
	for _, u := range s.surfers {
		u.rest()
	}

	// The faults that are left are healed now, in the order of their ends.
	for len(s.faults) > 0 {
		s.healDue(s.faults[0].until)
	}
	s.ready()
}

// failOnce breaks something, unless a replay leaves it out. Each fault has random numbers of its own, so that leaving
// one out changes little of the rest.
func (s *simulation) failOnce() {
	number := s.made
	s.made++
	if s.replay && slices.Contains(strings.Split(*simWithout, ","), strconv.Itoa(number)) {
		return
	}

	s.log("fault %d:", number)
	rest := s.chance
	s.chance = chance(s.seed, fmt.Sprint("fault ", number))
	s.fail()
	s.chance = rest
}

// quiet waits until all counts must be exact, and checks them.
func (s *simulation) quiet(round int) {
	lasts := simQuiet

	// Ended holds that a former owner wrote again end only when they expire.
	if s.zombies {
		lasts = 3*simTimeout + simQuiet/2
		s.zombies = false
	}

	end := time.Now().Add(lasts)
	for _, u := range s.surfers {
		// A hold expires a moment after its end, and then the counts follow.
		end = slices.MaxFunc([]time.Time{end, u.heldUntil().Add(simQuiet / 2)}, time.Time.Compare)
	}
	for time.Now().Before(end) {
		time.Sleep(time.Second)
		if s.failed() {
			return
		}
	}

	s.comeBack()
	for _, u := range s.surfers {
		u.comeBack()
	}
	if !s.readers.idle() {
		s.broken("newest", "calls about notifications fail long after everything was healed")
	}
	s.check()
	s.readers.check()
	if s.failed() {
		s.explain()
		return
	}

	s.log("round %d: all is right: %v", round, s.sizes())
}

// comeBack waits until all programs are connected. A client whose gateway died without notice finds that out after
// three quarters of simQuiet at most, and then may have to wait before it tries again.
func (s *simulation) comeBack() {
	late := false
	isAway := func(a *app) bool { return !a.isConnected() }
	for end := time.Now().Add(simQuiet); slices.ContainsFunc(s.apps, isAway) && time.Now().Before(end); {
		late = true
		time.Sleep(100 * time.Millisecond)
	}
	if late {
		time.Sleep(simQuiet / 2)
	}
}

func (s *simulation) sizes() map[string]int {
	sizes := map[string]int{}
	for page, users := range s.crowd.truth() {
		sizes[page] = len(users)
	}

	return sizes
}

// check compares what the store, gateways, clients and owners know with the model.
func (s *simulation) check() {
	truth := s.sizes()
	names := append([]string{presence.AllPages}, s.pages...)

	s.store.mu.Lock()
	counts, err := s.store.inner.Counts(context.Background(), names)
	s.store.mu.Unlock()

	for i, c := range counts {
		if err != nil || c.Stale || c.Users != int64(truth[names[i]]) {
			s.broken("newest", "the store has %+v, %v; want %d", c, err, truth[names[i]])
		}
	}

	query := url.Values{"page": names}.Encode()
	for _, gw := range s.where {
		// The answer of every gateway is what the store has.
		status, body := s.request(gw, http.MethodGet, "/-/counters?"+query, "", "")
		var answer struct{ Counters []json.RawMessage }

		err := json.Unmarshal(body, &answer)
		if status != http.StatusOK || err != nil || len(answer.Counters) != len(names) {
			s.broken("newest", "%s answered %d %q, %v", gw, status, body, err)
			continue
		}

		for i, raw := range answer.Counters {
			want := int64(truth[names[i]])
			c, err := counterOf(raw)
			if err != nil || c.Page != names[i] || c.Users != want || c.Stale {
				s.broken("newest", "%s answered %s, %v; want %d on %s", gw, raw, err, want, names[i])
			}
		}
	}

	for _, u := range slices.Concat(s.crowd.users, s.watchers) {
		for _, t := range u.tabs {
			t.check(truth)
		}
	}
	for _, a := range s.apps {
		a.check(truth)
	}
	for _, u := range s.surfers {
		u.check(truth)
	}

	// One gateway suffices for each page: its answer is the sum over all gateways and owners.
	for i, page := range names {
		s.checkExplained(s.where[i%len(s.where)], page, truth[page])
	}

	s.checkOwners()
	s.checkEndpoints()
}

// checkOwners checks that all processes have the same table, and that each partition has one owner.
func (s *simulation) checkOwners() {
	hash := s.members[0].process.table.Load().Hash()
	owners := make([][]string, simPartitions)

	for _, m := range s.members {
		if h := m.process.table.Load().Hash(); h != hash {
			s.broken("–", "%s has table %x, %s has %x", s.members[0].name, hash, m.name, h)
		}
		for p := range owners {
			if m.node != nil && m.node.Owns(p) {
				owners[p] = append(owners[p], m.name)
			}
		}
	}

	for p, names := range owners {
		if len(names) != 1 {
			s.broken("–", "partition %d has the owners %q", p, names)
		}
	}
}

// explanation is what the owners and gateways together say about a count.
type explanation struct {
	People, Held, Leaving, Connections int
	Moving                             bool
}

// explained returns a gateway's explanation of a count, and its text. An owner may be writing that a hold was renewed,
// so the explanation may change for a moment.
func (s *simulation) explained(gateway, page string) (e explanation, body []byte) {
	for range 10 {
		var status int
		path := "/" + url.PathEscape(page) + "/counter?explain=1"
		status, body = s.request(gateway, http.MethodGet, path, "", "", simAPIKey)

		var is struct{ Explain *explanation }
		err := json.Unmarshal(body, &is)
		if status != http.StatusOK || err != nil || is.Explain == nil {
			s.broken("newest", "%s does not explain %s: %d %s, %v", gateway, page, status, body, err)
			return e, body
		}

		e = *is.Explain
		if !e.Moving {
			break
		}
		time.Sleep(137 * time.Millisecond) // not a multiple of 100 ms, at which changes may recur
	}

	return e, body
}

// checkExplained checks what the owners and gateways together say about a count. Nothing changes, so the parts must add
// up.
func (s *simulation) checkExplained(gateway, page string, users int) {
	e, body := s.explained(gateway, page)

	// Gateways count each join of a tab as a connection to the page and to the site.
	tabs := 0
	for _, u := range s.crowd.users {
		for _, t := range u.tabs {
			t.mu.Lock()
			for want := range t.want {
				if page == want || page == presence.AllPages {
					tabs++
				}
			}

			t.mu.Unlock()
		}
	}

	var clients [][]string
	renewed := 0
	for _, u := range s.surfers {
		clients = append(clients, u.pages()) // all pages of a program share one connection
		// Where a browser has no WebSocket, each page has an event stream, and the next one joins before it ends.
		renewed += len(u.pages())
	}

	for _, a := range s.apps {
		clients = append(clients, a.pages())
	}

	for _, joined := range slices.Concat(clients...) {
		if page == joined || page == presence.AllPages {
			tabs++
		}
	}

	connectionsFit := e.Connections >= tabs && e.Connections <= tabs+renewed
	if e.Moving || e.People != users || !connectionsFit || e.Leaving != 0 {
		s.broken("newest", "%s explains %s by %s; want %d people and %d connections", gateway, page, body, users, tabs)
	}
}

// checkEndpoints checks that no endpoint outlives its gateway.
func (s *simulation) checkEndpoints() {
	for b := range simBuckets {
		s.store.mu.Lock()
		ends, err := s.store.inner.Attached(context.Background(), b)
		s.store.mu.Unlock()
		must(err)

		for _, e := range ends {
			if !slices.ContainsFunc(s.members, func(m *member) bool {
				return presence.IncarnationName(m.name, m.process.self.Incarnation) == e.Gateway
			}) {
				s.broken("–", "%s is still attached to %s", e.Gateway, e.Topic)
			}
		}
	}
}

func (t *tab) check(truth map[string]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.link == nil {
		t.s.broken("newest", "%s is not connected", t.name)
		return
	}

	for _, page := range slices.Concat(t.watches, slices.Collect(maps.Keys(t.want))) {
		last, known := t.last[page]
		switch wrong := last.stale || last.users != int64(truth[page]); {
		case !known:
			t.s.broken("newest", "%s at %s has been told nothing of %s", t.name, t.at, page)
		case wrong:
			t.s.broken("newest", "%s at %s was last told %+v of %s; want %d", t.name, t.at, last, page, truth[page])
		}
	}
}

// explain logs the members in the store that differ from the model.
func (s *simulation) explain() {
	names := map[presence.User]string{}
	for _, u := range s.crowd.users {
		names[simIdentities().Hash(u.name)] = u.name
	}

	truth := s.crowd.truth()
	delete(truth, presence.AllPages)

	there := map[string]map[string]struct{}{}
	for p := range simPartitions {
		// The run is over, so this claim takes the partition from nobody.
		claims, err := s.store.inner.Claim(context.Background(), "", []int{p}, false)
		must(err)
		snaps, err := s.store.inner.Load(context.Background(), claims)
		must(err)

		for _, m := range snaps[0].Members {
			if there[m.Page] == nil {
				there[m.Page] = map[string]struct{}{}
			}
			there[m.Page][names[m.User]] = struct{}{}
		}
	}

	for u, name := range names {
		for page := range truth {
			_, wanted := truth[page][name]
			if _, is := there[page][name]; wanted != is {
				s.log("%s, of partition %d, is present on %s: %t; the store has it: %t",
					name, u.Partition(simPartitions), page, wanted, is)
			}
		}
	}
}

// end stops everything. A goroutine that still runs afterwards fails the test.
func (s *simulation) end() {
	for _, f := range s.faults {
		f.heal()
	}
	close(s.readers.ended)
	for _, a := range s.apps {
		a.stop()
	}
	for _, u := range s.surfers {
		u.browser.Close()
	}

	for _, u := range slices.Concat(s.crowd.users, s.watchers) {
		for _, t := range slices.Clone(u.tabs) {
			t.end(false)
		}

		for _, h := range u.holds {
			h.end()
		}
	}

	for _, m := range s.members {
		if m.running != nil && !m.leaving {
			m.life.kill(true)
			m.stop()
		}
	}

	s.clients.Wait()
	_ = s.counters().Close()
}

// newUser returns a user without tabs and holds.
func newUser(name string) *user {
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"sub": name}).SignedString([]byte(simSecret))
	if err != nil {
		panic(err)
	}

	return &user{name: name, token: token, hash: simIdentities().Hash(name), holds: map[string]*hold{}}
}

const (
	simSecret = "the secret of a simulation, of 32 bytes or more"
	simAPIKey = "X-API-Key: the key of a server"
)

// somePages returns one or two pages.
func (s *simulation) somePages() []string {
	pages := slices.Clone(s.pages)
	s.chance.Shuffle(len(pages), func(i, j int) { pages[i], pages[j] = pages[j], pages[i] })

	return pages[:1+s.chance.IntN(2)]
}

// userActs makes the user do something at random. A user who has to stay does nothing that ends the presence.
func (s *simulation) userActs(u *user) {
	var t *tab
	if len(u.tabs) > 0 {
		t = u.tabs[s.chance.IntN(len(u.tabs))]
	}

	page := s.pages[s.chance.IntN(len(s.pages))]

	// left returns the pages where the user is present without that tab and, if hold is set, without the hold of page.
	left := func(without *tab, hold bool) map[string]bool {
		there := map[string]bool{}
		// Only a settled tab, at a gateway that reaches the owners, surely keeps its user counted.
		for _, o := range u.tabs {
			if o != without && o.settled() && !s.isApart(o.gateway()) {
				for _, p := range o.joined() {
					there[p] = true
				}
			}
		}

		for p, h := range u.holds {
			if h.settled() && (!hold || p != page) {
				there[p] = true
			}
		}

		return there
	}

	// covered reports whether the user stays present on those of the pages where the user has to stay.
	covered := func(pages []string, there map[string]bool) bool {
		return !slices.ContainsFunc(pages, func(p string) bool { return u.stays[p] && !there[p] })
	}

	what := s.chance.IntN(10)
	opens := t == nil || what == 0 && len(u.tabs) < 4
	switch {
	case opens:
		pages := s.somePages()
		t = s.newTab(u, "", nil, pages...)
		s.log("%s opens %s at %s, on %v", u.name, t.name, t.gateway(), pages)
	case what == 1:
		s.log("%s joins %s", t.name, page)
		t.join(page)
	case what <= 3:
		joined := t.joined()
		if len(joined) == 0 {
			return
		}
		page = joined[s.chance.IntN(len(joined))]

		if covered([]string{page}, left(t, false)) {
			s.log("%s leaves %s", t.name, page)
			t.leave(page)
		}
	case what <= 5:
		if covered(t.joined(), left(t, false)) {
			silently := s.chance.IntN(3) == 0
			s.log("%s ends, silently %t", t.name, silently)
			t.end(silently)
		}
	case what <= 7:
		if len(u.stays) > 0 && (s.net.weather.Load().lost > 0 || s.parted()) {
			return // the grace may end before the return
		}

		to := s.someGateway(s.chance)
		i := slices.IndexFunc(s.members, func(m *member) bool { return m.name == to })
		if len(u.stays) > 0 && !s.members[i].serves(presence.RoleGateway) {
			return
		}

		pause := time.Duration(s.chance.Int64N(int64(400*time.Millisecond))) + 1
		s.log("%s moves to %s, within %s", t.name, to, pause)
		t.move(to, pause)
	case what == 8:
		s.log("%s holds %s", u.name, page)
		s.hold(u, page, true)
	case what == 9:
		if h := u.holds[page]; h != nil && h.wanted() && covered([]string{page}, left(nil, true)) {
			s.log("%s ends the hold of %s", u.name, page)
			s.hold(u, page, false)
		}
	}
}

// settled reports whether the tab has received the counts of its pages: then its user is known to be present.
func (t *tab) settled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.link == nil {
		return false
	}

	for p := range t.want {
		if _, known := t.last[p]; !known {
			return false
		}
	}

	return true
}

// embeddable is a store for a member and all of its roles.
type embeddable interface {
	presence.Store
	presence.Processes
	presence.Lister
	unread.Store
}

// start begins a life of the member.
func (s *simulation) start(m *member) {
	// The wall clock of the process's machine may be an hour off.
	wall := func() time.Time { return time.Now().Add(m.skew) }
	clock := &seal.Clock{}
	incarnation := uint64(wall().UnixMilli())
	self := presence.Process{Name: m.name, Roles: m.roles, Incarnation: incarnation}

	log := zerolog.Nop()
	if s.replay {
		log = zerolog.New(lineWriter(func(line string) { s.detail("%s: %s", m.name, line) })).Level(zerolog.InfoLevel)
	}

	l := s.net.live(m.name, incarnation)
	elapsed := func() time.Duration { // a goroutine that reads this clock is suspended with the process
		_ = l.pass()
		return time.Duration(time.Now().UnixNano())
	}

	p := New(Config{
		Self: self, Partitions: simPartitions, Buckets: simBuckets, PresenceTimeout: s.timeout, Clock: clock,
		Wall:    wall,
		Elapsed: elapsed, Log: log,
	})

	h := &handle{sharedStore: s.store, l: l, state: p.StoreState, facts: cmp.Or(m.facts, "settings")}

	keys := [][]byte{[]byte("a cluster secret")}
	transport, err := heartbeat.New(heartbeat.Config{
		Conn: l.socket, Keys: keys, Name: m.name, Incarnation: incarnation, Partitions: simPartitions,
		Resolver: s.net, Now: clock.Now, OnBeat: p, OnReply: p, OnTable: p, Log: log,
	})
	must(err)

	client, err := rpc.NewClient(rpc.ClientConfig{Keys: keys, Name: m.name, Transport: l, Now: clock.Now})
	must(err)

	l.calls, err = rpc.NewHandler(rpc.Config{
		Keys: keys, Name: m.name, Now: clock.Now, Log: log,
		Updates: p, Holds: p, Users: p, Parts: p,
	})
	must(err)

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup

	r := &running{life: l, process: p, left: make(chan struct{}), refused: make(chan error, 1)}
	r.stop = func() {
		cancel()
		l.listener.Close()
		wg.Wait()
	}

	parts := Parts{Store: h, Datagrams: transport, Calls: client}
	var store embeddable = h
	var outbox webhook.Store = hookStore{h}
	if s.alone {
		// The data of a single process ends with it.
		s.store.set(func() { s.store.inner = s.store.fresh() })
		s.readers.lose(time.Time{})
		s.receiver.lose()
		outbox = webhookmem.New()
		store = &ownStore{s.store.inner, l, s.store.past}
		parts = Parts{Store: store}
	}

	hooks := webhook.New(webhook.Config{
		Hooks: simHooks(), Keys: simHookKeys, Store: outbox, Pages: store, Users: p, Settle: simSettle,
		Transport: sender{s.receiver, l}, Log: log,
	})

	if p.Has(presence.RolePresence) {
		r.node, err = node.New(store, node.Config{
			Name: m.name, Partitions: simPartitions, PresenceTimeout: s.timeout, Reply: p, Log: log,
			Tick: func() { _ = l.pass() }, Elapsed: elapsed, Departures: hooks,
		})
		must(err)
		parts.Node = r.node
	}

	if p.Has(presence.RoleDispatcher) {
		parts.Dispatcher = dispatcher.New(dispatcher.Config{
			Store: store, Gateways: p, Elapsed: elapsed, Log: log,
			Watchers: []dispatcher.Watcher{hookBuckets{hooks, s.pages}},
		})
	}

	if p.Has(presence.RoleGateway) {
		r.gateway = s.newGateway(m.name, incarnation, p, store, hooks, elapsed, log)
		parts.Gateway = r.gateway
		srv := &http.Server{
			// as in the program
			Handler: r.gateway.Handler(), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 15 * time.Second,
			ErrorLog: stdlog.New(io.Discard, "", 0),
		}

		wg.Go(func() { _ = srv.Serve(l.listener) })
		// The handlers end before the process that they use.
		stop := r.stop
		r.stop = func() {
			_ = srv.Close()
			stop()
		}
	}

	p.Join(parts)
	wg.Go(func() { hooks.Run(ctx) })
	if !s.alone {
		wg.Go(func() { h.run(ctx) })
	}

	wg.Go(func() {
		err := p.Run(ctx)
		if m.facts != "" {
			r.refused <- err
			return
		}
		if err != nil && !l.ended() {
			s.broken("–", "%s ended by itself: %v", m.name, err)
		}
	})

	m.running = r
}

func simIdentities() *identity.Identities {
	identities := identity.New(identity.Config{
		IDSecrets: [][]byte{[]byte("x")}, HashKey: []byte("y"), JWTSecret: []byte(simSecret),
	})
	return identities
}

func (s *simulation) newGateway(
	name string, incarnation uint64, p *Member, store embeddable, hooks *webhook.Service,
	elapsed func() time.Duration, log zerolog.Logger,
) *gateway.Gateway {
	origins, _ := identity.NewOrigins(nil) // an empty list is never an error, here and below
	proxies, _ := identity.NewProxies(nil)
	sites, _ := identity.NewSites(nil)
	_, key, _ := strings.Cut(simAPIKey, ": ")
	keys, err := identity.NewSiteKeys([]string{key}, sites)
	must(err)

	gw, err := gateway.New(gateway.Config{
		Name: name, Incarnation: incarnation, Partitions: simPartitions, Buckets: simBuckets, Store: store,
		Unread: store, Cluster: p, Elapsed: elapsed,
		Times: gateway.Times{
			HeartbeatInterval: min(s.timeout/3, 2*time.Second), UpdateInterval: 250 * time.Millisecond,
			WriteTimeout: 5 * time.Second,
			LeaveGrace:   simGrace, PingInterval: simPing, PongTimeout: simPong, ShutdownTimeout: 5 * time.Second,
		},
		Limits: gateway.Limits{MaxConnections: 100_000},
		Access: api.Access{Identities: simIdentities(), Sites: sites, Proxies: proxies, Keys: keys},
		Counters: counterapi.Config{
			Rules: &counter.Rules{}, Counters: s.counters(),
		},
		API: api.Config{
			Origins: origins, HoldTime: 21 * time.Second, Assets: fstest.MapFS{},
			Arrivals: hooks,
			Regions:  store.(api.Regions),
		}, Log: log,
	})

	must(err)
	return gw
}

// ready waits until every process can do its roles.
func (s *simulation) ready() {
	for end := time.Now().Add(10 * time.Second); ; {
		var err error
		for _, m := range s.members {
			if e := m.process.Ready(); e != nil {
				err = fmt.Errorf("%s: %w", m.name, e)
			}
			m.look()
		}

		if err == nil || s.failed() {
			return
		}

		if time.Now().After(end) {
			s.broken("newest", "not ready for 10 s after everything was healed: %v", err)
			return
		}

		time.Sleep(100 * time.Millisecond)
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

type lineWriter func(string)

func (w lineWriter) Write(b []byte) (int, error) {
	w(strings.TrimSpace(string(b)))
	return len(b), nil
}
