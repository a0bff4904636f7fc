package simulate

// truth is what the run itself has done: who is on which page with how many
// tabs. One goroutine, the one that drives the crowd, owns it.
type truth struct {
	pages map[string]map[*user]int // page, user, tabs there
	users map[*user]int            // user, tabs on any page
}

func newTruth() *truth {
	return &truth{pages: map[string]map[*user]int{}, users: map[*user]int{}}
}

// enter notes one more tab of u on the page. A page that the server must refuse
// is nowhere.
func (t *truth) enter(u *user, page string) {
	if !validPage(page) {
		return
	}
	if t.pages[page] == nil {
		t.pages[page] = map[*user]int{}
	}
	t.pages[page][u]++
	t.users[u]++
}

// exit notes one tab less; without a tab there it does nothing.
func (t *truth) exit(u *user, page string) {
	if t.pages[page][u] == 0 {
		return
	}
	less(t.pages[page], u)
	if len(t.pages[page]) == 0 {
		delete(t.pages, page)
	}
	less(t.users, u)
}

func less(tabs map[*user]int, u *user) {
	if tabs[u]--; tabs[u] == 0 {
		delete(tabs, u)
	}
}

// count is the number of distinct users on the page, or, for `*`, on any.
func (t *truth) count(page string) int64 {
	if page == wholeSite {
		return int64(len(t.users))
	}
	return int64(len(t.pages[page]))
}

const wholeSite = "*"
