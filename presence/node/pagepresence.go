package node

import (
	"slices"
	"time"
)

// pagePresence is a session's presence on one page.
type pagePresence struct {
	page  *page
	until time.Duration // the end of a grace or a hold; 0: open-ended, as long as the session
}

// outlasts reports whether pp ends after o. An open-ended presence outlasts every other one.
func (pp pagePresence) outlasts(o *pagePresence) bool {
	if pp.until == 0 {
		return true
	}
	return o.until != 0 && o.until < pp.until
}

// maxUnindexed is the longest list that is searched one by one; a longer one has an index.
const maxUnindexed = 16

// pagePresences are the page presences of one session. Every operation takes constant
// time, so that a user on thousands of pages does not hold up the partition.
type pagePresences struct {
	list      []pagePresence
	index     map[*page]int // into list; nil for a short list
	openEnded int           // elements with until 0
	// earliestEnd is a lower bound of the ends in list; 0: all are open-ended. After an
	// element was changed or removed it may be too early until expire computes it again.
	earliestEnd time.Duration
}

// live reports whether any page presence is open-ended.
func (s *pagePresences) live() bool { return s.openEnded > 0 }

// indexOf returns the index in list of the presence on pg, or -1.
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

// find returns the presence on pg, or nil. It is valid until the next add or remove.
func (s *pagePresences) find(pg *page) *pagePresence {
	if i := s.indexOf(pg); i >= 0 {
		return &s.list[i]
	}

	return nil
}

// add adds a presence on a page that has none.
func (s *pagePresences) add(pg *page, until time.Duration) {
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

// set changes the end of a presence.
func (s *pagePresences) set(pp *pagePresence, until time.Duration) {
	if pp.until == 0 {
		s.openEnded--
	}
	pp.until = until
	if until == 0 {
		s.openEnded++
	}

	s.noteEnd(until)
}

// noteEnd lowers earliestEnd to until.
func (s *pagePresences) noteEnd(until time.Duration) {
	if until != 0 && (s.earliestEnd == 0 || until < s.earliestEnd) {
		s.earliestEnd = until
	}
}

func (s *pagePresences) remove(pp *pagePresence) {
	if pp.until == 0 {
		s.openEnded--
	}

	i, last := s.indexOf(pp.page), len(s.list)-1
	delete(s.index, pp.page)

	// The last element takes the place of the removed one, so nothing else moves.
	if i < last {
		s.list[i] = s.list[last]
		if s.index != nil {
			s.index[s.list[i].page] = i
		}
	}

	s.list[last] = pagePresence{}

	s.list = s.list[:last]
	if s.index != nil && last <= maxUnindexed/2 {
		s.list = slices.Clone(s.list) // the old array may have had room for thousands
		s.index = nil
	}
}
