package simulate

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// churn is the default run. Users come and leave in every possible way. The users
// who stay move to other pages, reload, and open and close tabs.
type churn struct {
	*crowd
	whole   bool // --duration includes the checkpoints at the end; otherwise they come after it
	zipf    *rand.Zipf
	present []*user
	away    []*user // some of the users who left; they may come back with the same id
	tally   ChurnReport
}

// A ChurnReport says what the users did.
type ChurnReport struct {
	Came       int `json:"came"` // users
	CameBack   int `json:"came_back"`
	Left       int `json:"left"`        // users
	LeftKilled int `json:"left_killed"` // tabs, by a connection that ended or was reset
	Vanished   int `json:"vanished"`    // tabs, by silence
	Moved      int `json:"moved"`       // tabs
	Reloaded   int `json:"reloaded"`
	TabsOpened int `json:"tabs_opened"`
	TabsClosed int `json:"tabs_closed"`
}

func (r *ChurnReport) String() string {
	return fmt.Sprintf("%d users came, %d came back, %d left (%d tabs killed, %d silent); %d tabs moved, %d reloaded, "+
		"%d opened, %d closed", r.Came, r.CameBack, r.Left, r.LeftKilled, r.Vanished, r.Moved, r.Reloaded, r.TabsOpened,
		r.TabsClosed)
}

// Checkpoints during the run come this often, and twice in a short run. A run that
// is shorter than shortRun has only the checkpoints before and after it.
const (
	checkEvery = time.Minute
	shortRun   = 8 * time.Second
	checkTime  = 500 * time.Millisecond // of a checkpoint, when all users who left are gone
)

// lastChecks returns how long before its end a run begins its last two checkpoints, each of which waits for the leave
// grace.
func lastChecks(duration, grace time.Duration) time.Duration {
	return min(2*(grace+checkTime), duration/2)
}

// churners returns how many connections a churn needs at once, at most. Beside all tabs, half as many may be closing.
func churners(cfg *Command) int { return cfg.Users * cfg.Tabs * 3 / 2 }

func (c *crowd) mixed(ctx context.Context) error {
	churn := &churn{crowd: c, whole: true}
	return churn.work(ctx)
}

// measuredChurn measures all of --duration, and has its last checkpoints after that.
func (c *crowd) measuredChurn(ctx context.Context) error {
	defer c.measure()()

	churn := &churn{crowd: c}
	return churn.work(ctx)
}

func (r *churn) work(ctx context.Context) error {
	r.result.Churn = &r.tally
	// Most visits go to few pages, as on real sites, so there are crowded pages and empty ones.
	r.zipf = rand.NewZipf(r.rng, 1.2, 1, uint64(len(r.pages)-1))

	r.enterPhase("arriving")
	for range r.cfg.Users {
		if err := r.come(ctx); err != nil {
			return err
		}
	}

	if err := r.checkpoint(ctx, "full"); err != nil {
		return err
	}

	end := time.Now().Add(r.cfg.Duration)
	noticed := time.Time{}
	if r.whole {
		end = end.Add(-lastChecks(r.cfg.Duration, r.cfg.LeaveGrace))
		noticed = end.Add(r.cfg.LeaveGrace)
	}

	if r.cfg.Duration >= shortRun {
		for next := time.Now(); ; {
			next = next.Add(min(checkEvery, r.cfg.Duration/2))
			// A checkpoint just before the final one would add nothing.
			if next.After(end.Add(-checkEvery / 20)) {
				break
			}

			if err := r.churn(ctx, next, next); err != nil {
				return err
			}
			if err := r.checkpoint(ctx, "mid"); err != nil {
				return err
			}
		}
	}

	if err := r.churn(ctx, end, noticed); err != nil {
		return err
	}

	if err := r.checkpoint(ctx, "final"); err != nil {
		return err
	}

	// Nobody falls silent here, because the last checkpoint would have to wait until the server notices.
	for len(r.present) > 0 {
		r.depart(len(r.present)-1, false)
	}

	return r.checkpoint(ctx, "empty")
}

// churn lets users come and go until the given time. When the clients cannot keep up, it makes up for one second at
// most. A tab falls silent only if the server must notice that before the time noticed, so that the next checkpoint
// need not wait for it; if noticed is zero, tabs fall silent at any time.
func (r *churn) churn(ctx context.Context, until, noticed time.Time) error {
	defer r.enterPhase(r.enterPhase("churning"))

	rate := r.cfg.Churn * float64(r.cfg.Users)
	if rate == 0 {
		return sleep(ctx, time.Until(until))
	}

	gap := time.Duration(float64(time.Second) / rate)
	for next := time.Now().Add(gap); next.Before(until); next = next.Add(gap) {
		if err := sleep(ctx, time.Until(next)); err != nil {
			return err
		}

		// A driver that fell behind does not make up for everything at once: that would be a storm, not a churn.
		late := time.Now().Add(-time.Second)
		if next.Before(late) {
			next = late
		}

		silent := noticed.IsZero() || time.Until(noticed) > r.ghostBound()
		if err := r.comeOrLeave(ctx, silent); err != nil {
			return err
		}

		if err := r.stir(ctx, silent); err != nil {
			return err
		}
	}

	return sleep(ctx, time.Until(until))
}

// comeOrLeave keeps between four fifths of the users and all of them present.
func (r *churn) comeOrLeave(ctx context.Context, silent bool) error {
	n := len(r.present)
	most := n == r.cfg.Users
	enough := n > r.cfg.Users*4/5
	if n > 0 && (most || enough && r.rng.IntN(2) == 0) {
		r.depart(r.rng.IntN(n), silent)
		return nil
	}

	return r.come(ctx)
}

// come brings a new user, or one who was here before.
func (r *churn) come(ctx context.Context) error {
	var u *user
	if n := len(r.away); n > 0 && r.rng.IntN(2) == 0 {
		i := r.rng.IntN(n)
		u, r.away[i] = r.away[i], r.away[n-1]
		r.away = r.away[:n-1]
		r.tally.CameBack++
	} else {
		u = r.newUser()
		r.tally.Came++
	}

	r.present = append(r.present, u)

	// Half of the next tabs are on the same page, where the user must count once.
	page := r.drawPage()
	for range 1 + r.rng.IntN(r.cfg.Tabs) {
		if _, err := r.enter(ctx, u, page); err != nil {
			return err
		}

		if r.rng.IntN(2) == 0 {
			page = r.drawPage()
		}
	}

	return nil
}

func (r *churn) drawPage() string { return r.pages[r.zipf.Uint64()] }

// depart closes all tabs of a user. It remembers departed users, at most as many as may be present at once; a further
// one takes the place of another.
func (r *churn) depart(i int, silent bool) {
	u := r.present[i]
	r.present = slices.Delete(r.present, i, i+1)
	for _, tab := range u.open() {
		r.closeTab(tab, silent)
	}

	r.tally.Left++

	if len(r.away) < r.cfg.Users {
		r.away = append(r.away, u)
	} else {
		r.away[r.rng.IntN(len(r.away))] = u
	}
}

func (r *churn) closeTab(tab *tab, silent bool) {
	how := r.exitWay(silent)
	switch how {
	case endsSocket, resetSocket:
		r.tally.LeftKilled++
	case vanishes:
		r.tally.Vanished++
	}

	r.leave(tab, how)
}

// stir lets a user who stays do something. It never closes the last tab of a user.
func (r *churn) stir(ctx context.Context, silent bool) error {
	if len(r.present) == 0 {
		return nil
	}

	u := r.present[r.rng.IntN(len(r.present))]
	tabs := u.open()
	tab := tabs[r.rng.IntN(len(tabs))]

	// All are equally likely, so that even a short run has some of each.
	switch r.rng.IntN(4) {
	case 0:
		r.tally.Moved++
		r.move(tab, r.drawPage())
		return nil
	case 1:
		r.tally.Reloaded++
		tab.reload()
		return nil
	case 2:
		// A user with all its tabs closes one below instead.
		if len(tabs) < r.cfg.Tabs {
			r.tally.TabsOpened++
			_, err := r.enter(ctx, u, r.drawPage())
			return err
		}
	}

	if len(tabs) > 1 {
		r.tally.TabsClosed++
		r.closeTab(tab, silent)
	}
	return nil
}
