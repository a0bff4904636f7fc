package dispatcher

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"headcount/presence"
	"headcount/presence/presencemem"
)

// of returns the bucket and updates of a page's count, the arguments of update.
func of(page string, users int64, sequence uint64) (bucket int, updates []presence.Update) {
	c := presence.Count{Page: page, Users: users, Version: presence.Version{Incarnation: 1, Sequence: sequence}}
	return presence.Bucket(page, presence.DefaultBuckets), []presence.Update{c.Update()}
}

// whole returns a store of two partitions. All but the partition of run are complete.
func whole(t *testing.T) *presencemem.Store {
	t.Helper()
	s := presencemem.New(presencemem.Config{Partitions: 2})
	claims, err := s.Claim(t.Context(), "other", []int{0}, false)
	if err != nil {
		t.Fatal(err)
	}

	s.Write(t.Context(), []presence.Change{{Claim: claims[0], Sequence: 1, Complete: true}})
	return s
}

func TestTopFollowsTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := whole(t)
		_, d, set := run(t, s)
		synctest.Wait()

		for page, users := range map[string]int64{"a": 3, "b": 7, "c": 7, "gone": 9, presence.AllPages: 20} {
			set(page, users)
		}
		set("gone", 0)
		set("a", 8)
		synctest.Wait()

		want := []presence.PageUsers{{Page: "a", Users: 8}, {Page: "b", Users: 7}, {Page: "c", Users: 7}}
		if got := d.Top(10); !slices.Equal(got, want) {
			t.Errorf("Top(10) = %v, want %v", got, want)
		}
		if got := d.Top(2); !slices.Equal(got, want[:2]) {
			t.Errorf("Top(2) = %v, want %v", got, want[:2])
		}

		bucket := presence.Bucket("c", presence.DefaultBuckets)
		d.Own([]int{bucket})
		synctest.Wait()
		want = slices.DeleteFunc(want, func(p presence.PageUsers) bool {
			return presence.Bucket(p.Page, presence.DefaultBuckets) != bucket
		})
		if got := d.Top(10); !slices.Equal(got, want) || len(want) == 3 {
			t.Errorf("with c's bucket alone Top = %v, want %v", got, want)
		}
	})
}

// A dispatcher that starts late learns the pages that have subscribers. A dispatcher that missed publications reads the
// pages that it knew.
func TestTopAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := whole(t)
		if _, err := s.Attach(t.Context(), "gw", presence.CountTopics([]string{"seen"})); err != nil {
			t.Fatal(err)
		}

		_, d, set := run(t, s)
		set("seen", 2)
		set("held", 3)
		synctest.Wait()

		// As if the publications of these pages had been lost.
		d.top.mu.Lock()
		for _, pages := range d.top.pages {
			for name, c := range pages {
				c.Users = 99
				c.Version.Sequence = 0
				pages[name] = c
			}
		}
		d.top.mu.Unlock()
		d.Own(upTo(presence.DefaultBuckets)) // a new watch reads every bucket
		synctest.Wait()

		want := []presence.PageUsers{{Page: "held", Users: 3}, {Page: "seen", Users: 2}}
		if got := d.Top(10); !slices.Equal(got, want) {
			t.Errorf("Top = %v, want %v", got, want)
		}
	})
}

func upTo(n int) (all []int) {
	for i := range n {
		all = append(all, i)
	}
	return all
}

func TestTopTakesNoOlderAndNoStaleCount(t *testing.T) {
	var d Dispatcher
	d.top.serve(upTo(presence.DefaultBuckets))

	d.top.update(of("p", 5, 9))
	d.top.update(of("p", 4, 8))
	d.top.update(of("p", 0, 7))

	// A stale count may lack users, so it must not lower the count in the list.
	bucket, stale := of("p", 1, 10)
	stale[0].Stale = true
	d.top.update(bucket, stale)

	if got := d.Top(1); len(got) != 1 || got[0].Users != 5 {
		t.Errorf("the list is %v, want 5 users", got)
	}
}

// A site with few users has its own list, beside a site with many users.
func TestTopOfSites(t *testing.T) {
	var d Dispatcher
	d.top.serve(upTo(presence.DefaultBuckets))
	shop := presence.SiteOf("shop")

	for i := range 5 {
		d.top.update(of(fmt.Sprint("p", i), int64(100+i), 1))
		d.top.update(of(shop.Qualify(fmt.Sprint("p", i)), int64(1+i), 1))
	}
	d.top.update(of(shop.Qualify(presence.AllPages), 9, 1)) // not a page

	got := d.Top(2)
	want := []presence.PageUsers{
		{Page: "p4", Users: 104}, {Page: "p3", Users: 103}, {Page: shop.Qualify("p4"), Users: 5},
		{Page: shop.Qualify("p3"), Users: 4},
	}
	if !slices.Equal(got, want) {
		t.Errorf("the list of the site is %v, want %v", got, want)
	}
}

// public has the pages with one name.
type public string

func (p public) Has(name string) bool { return presence.KeyOf(name) == string(p) }

// A public page is in the list, however many users all other pages have.
func TestTopOfPublicPages(t *testing.T) {
	d := Dispatcher{cfg: Config{Public: public("p0")}}
	d.top.serve(upTo(presence.DefaultBuckets))
	shop := presence.SiteOf("shop")

	for i := range 5 {
		d.top.update(of(fmt.Sprint("p", i), int64(100+i), 1))
		d.top.update(of(shop.Qualify(fmt.Sprint("p", i)), int64(1+i), 1))
	}

	got := d.Top(2)
	want := []presence.PageUsers{
		{Page: "p4", Users: 104}, {Page: "p3", Users: 103}, {Page: "p0", Users: 100},
		{Page: shop.Qualify("p4"), Users: 5}, {Page: shop.Qualify("p3"), Users: 4},
		{Page: shop.Qualify("p0"), Users: 1},
	}
	if !slices.Equal(got, want) {
		t.Errorf("the list is %v, want %v", got, want)
	}

	d.cfg.Public = all{}
	if got := d.Top(2); len(got) != 4 {
		t.Errorf("the list of public pages alone is %v, want two of each site", got)
	}
}

// all has every page.
type all struct{}

func (all) Has(string) bool { return true }

// The dispatcher remembers at most maxTop pages: the largest ones.
func TestTopIsBounded(t *testing.T) {
	var d Dispatcher
	d.top.serve(upTo(presence.DefaultBuckets))

	const pages = 3 * maxTop
	for _, i := range rand.Perm(pages) {
		d.top.update(of(fmt.Sprint("p", i), int64(1+i%1000), 1))
	}

	size := 0
	for _, pages := range d.top.pages {
		size += len(pages)
	}

	if size != d.top.size || size > maxTop || size < maxTop/2 {
		t.Errorf("%d pages are remembered, and %d are counted; want maxTop at most", size, d.top.size)
	}

	// There are 48 or 49 pages with each count. Only pages that came after the last time that the dispatcher forgot
	// pages may be small.
	if got := d.Top(40); len(got) != 40 || got[0].Users != 1000 || got[39].Users != 1000 {
		t.Errorf("the smallest remembered counts are %v", got)
	}
}
