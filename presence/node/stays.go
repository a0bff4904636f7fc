package node

import "slices"

// stay is a session's presence on one page.
type stay struct {
	page *page
	// until is when the stay ends by itself, in the partition's milliseconds: the
	// end of a grace or a hold. 0: the stay lasts as long as the session.
	until int64
}

// fewStays is how many stays are searched one by one; more have an index.
const fewStays = 16

// stays are those of one session. Each step takes the same time however many there are: one user
// with many pages must not hold up the others of the partition.
type stays struct {
	list    []stay
	index   map[*page]int // places in list; nil while there are few
	lasting int           // stays with until 0
	soonest int64         // no stay ends by itself before; 0: none does. A stay that was moved or removed may leave it too early
}

// live reports whether a stay lasts as long as the session.
func (s *stays) live() bool { return s.lasting > 0 }

// place returns the place of the stay on pg in list, or -1.
func (s *stays) place(pg *page) int {
	if s.index != nil {
		if i, ok := s.index[pg]; ok {
			return i
		}
		return -1
	}
	for i := range s.list {
		if s.list[i].page == pg {
			return i
		}
	}
	return -1
}

// find returns the stay on pg, or nil. It is valid until the next add or remove.
func (s *stays) find(pg *page) *stay {
	if i := s.place(pg); i >= 0 {
		return &s.list[i]
	}
	return nil
}

// add adds a stay on a page that has none.
func (s *stays) add(pg *page, until int64) {
	if s.list == nil {
		s.list = make([]stay, 0, 1) // most users are on one page
	}
	s.list = append(s.list, stay{pg, until})
	switch n := len(s.list); {
	case s.index != nil:
		s.index[pg] = n - 1
	case n > fewStays:
		s.index = make(map[*page]int, 2*n)
		for i := range s.list {
			s.index[s.list[i].page] = i
		}
	}
	s.ends(until)
	if until == 0 {
		s.lasting++
	}
}

// set moves the end of a stay.
func (s *stays) set(st *stay, until int64) {
	if st.until == 0 {
		s.lasting--
	}
	if st.until = until; until == 0 {
		s.lasting++
	}
	s.ends(until)
}

// ends notes the end of a stay.
func (s *stays) ends(until int64) {
	if until != 0 && (s.soonest == 0 || until < s.soonest) {
		s.soonest = until
	}
}

// remove removes a stay.
func (s *stays) remove(st *stay) {
	if st.until == 0 {
		s.lasting--
	}
	i, last := s.place(st.page), len(s.list)-1
	delete(s.index, st.page)
	if i < last {
		s.list[i] = s.list[last]
		if s.index != nil {
			s.index[s.list[i].page] = i
		}
	}
	s.list[last] = stay{}
	if s.list = s.list[:last]; s.index != nil && last <= fewStays/2 {
		s.list, s.index = slices.Clone(s.list), nil // the memory of thousands must not stay with a few
	}
}
