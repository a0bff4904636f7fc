package presencemem

import (
	"context"

	"headcount/presence"
	"headcount/unread"
)

// kinds has the function that reads the newest update of each kind of topic. The
// caller holds none of the store's locks.
var kinds = map[presence.Kind]func(s *Store, name string) presence.Update{
	presence.KindCount: (*Store).countUpdate,
	unread.KindLevel:   (*Store).levelUpdate,
	unread.KindRecord:  (*Store).recordUpdate,
}

// Updates implements presence.Updates. A topic of an unknown kind reads as never
// published.
func (s *Store) Updates(_ context.Context, topics []presence.Topic) ([]presence.Update, error) {
	updates := make([]presence.Update, len(topics))
	for i, t := range topics {
		updates[i].Topic = t
		if read := kinds[t.Kind]; read != nil {
			updates[i] = read(s, t.Name())
		}
	}

	return updates, nil
}

func (s *Store) countUpdate(page string) presence.Update {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.count(page).Update()
}

func (s *Store) levelUpdate(page string) presence.Update {
	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	if p := s.unread.pages[page]; p != nil {
		return p.level.Update(page)
	}

	return presence.Update{Topic: unread.LevelTopic(page)}
}

func (s *Store) recordUpdate(key string) presence.Update {
	topic := presence.Update{Topic: presence.Topic{Kind: unread.KindRecord, Key: key}}
	user, ok := unread.UserOf(topic)
	// A key that is no user was never published.
	if !ok {
		return topic
	}

	s.unread.mu.RLock()
	defer s.unread.mu.RUnlock()

	if r := s.unread.records[user]; r != nil {
		return r.Update(user)
	}

	return topic
}
