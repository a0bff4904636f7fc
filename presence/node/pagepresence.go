package node

import "slices"

// pagePresence is a session's presence on one page.
type pagePresence struct {
	page *page
	// until is when the stay ends by itself, in the partition's milliseconds: the
	// end of a grace or a hold. 0: the stay lasts as long as the session.
	until int64
}

// maxUnindexed is how many stays are searched one by one; more have an index.
const maxUnindexed = 16

// pagePresences are those of one session. Each step takes the same time however many there are: one user
// with many pages must not hold up the others of the partition.
type pagePresences struct {
	list        []pagePresence
	index       map[*page]int // places in list; nil while there are few
	openEnded   int           // stays with until 0
	earliestEnd int64         // no stay ends by itself before; 0: none does. A stay that was moved or removed may leave it too early
}

// live reports whether a stay lasts as long as the session.
func (s *pagePresences) live() bool { return s.openEnded > 0 }

// indexOf returns the place of the stay on pg in list, or -1.
func (s *pagePresences) indexOf(pg *page) int {
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
func (s *pagePresences) find(pg *page) *pagePresence {
	if i := s.indexOf(pg); i >= 0 {
		return &s.list[i]
	}
	return nil
}

// add adds a stay on a page that has none.
func (s *pagePresences) add(pg *page, until int64) {
	if s.list == nil {
		s.list = make([]pagePresence, 0, 1) // most users are on one page
	}
	s.list = append(s.list, pagePresence{pg, until})
	switch n := len(s.list); {
	case s.index != nil:
		s.index[pg] = n - 1
	case n > maxUnindexed:
		s.index = make(map[*page]int, 2*n)
		for i := range s.list {
			s.index[s.list[i].page] = i
		}
	}
	s.noteEnd(until)
	if until == 0 {
		s.openEnded++
	}
}

// set moves the end of a stay.
func (s *pagePresences) set(st *pagePresence, until int64) {
	if st.until == 0 {
		s.openEnded--
	}
	if st.until = until; until == 0 {
		s.openEnded++
	}
	s.noteEnd(until)
}

// noteEnd notes the end of a stay.
func (s *pagePresences) noteEnd(until int64) {
	if until != 0 && (s.earliestEnd == 0 || until < s.earliestEnd) {
		s.earliestEnd = until
	}
}

// remove removes a stay.
func (s *pagePresences) remove(st *pagePresence) {
	if st.until == 0 {
		s.openEnded--
	}
	i, last := s.indexOf(st.page), len(s.list)-1
	delete(s.index, st.page)
	if i < last {
		s.list[i] = s.list[last]
		if s.index != nil {
			s.index[s.list[i].page] = i
		}
	}
	s.list[last] = pagePresence{}
	if s.list = s.list[:last]; s.index != nil && last <= maxUnindexed/2 {
		s.list, s.index = slices.Clone(s.list), nil // the memory of thousands must not stay with a few
	}
}
