package presenceredis

import (
	"fmt"
	"time"

	"headcount/presence"
	"headcount/presence/hashkey"
)

// The key of user hashes is in the facts, sealed with the id secrets. Every process
// keeps the seals in memory, to write them again when Redis has lost them. A process
// that needs the key opens one of the seals, and adds a seal with its own first secret.
// If there have been no seals for long enough, it creates the key.

// sealedMend says what to do when a process cannot open the seals.
const sealedMend = "give this process an --id-secret of the others, too"

// ourSeals returns the seals (id, seal, …) that renew.lua writes if there are none, and
// those that it adds if there are some.
func (s *Store) ourSeals() (restore, add []any) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for id, seal := range s.seals {
		restore = append(restore, id, seal)
	}

	// This process needs no key. It restores the seals of those that do.
	if s.cfg.HashKeys == nil {
		return restore, nil
	}

	// Every process has the key of user hashes sealed with its own first secret. A new key is made only when no process
	// has had the time to restore the seals that Redis lost.
	first := s.cfg.IDSecrets[0]
	id := hashkey.ID(first)
	if s.hashKey != nil {
		if s.seals[id] == "" {
			add = append(add, id, hashkey.Seal(first, s.hashKey))
		}
		return restore, add
	}

	missing := len(s.seals) == 0 && !s.sealsMissing.IsZero()
	if missing && time.Since(s.sealsMissing) >= s.cfg.FactsWait {
		restore = append(restore, id, hashkey.Seal(first, hashkey.New()))
	}

	return restore, add
}

// takeSealsLocked stores the seals that are in Redis, and opens one to get the key.
func (s *Store) takeSealsLocked(pairs []string) error {
	if len(pairs) > 0 {
		// Keep only the seals that Redis has now: after a loss, exactly these are written again.
		s.seals = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			s.seals[pairs[i]] = pairs[i+1]
		}
		s.sealsMissing = time.Time{}
	} else if s.sealsMissing.IsZero() {
		s.sealsMissing = time.Now()
	}

	if s.cfg.HashKeys == nil || s.hashKey != nil {
		return nil
	}
	// Another process may be about to restore the seals. ourSeals makes a new key only after Config.FactsWait.
	if len(s.seals) == 0 {
		return presence.ErrNoFacts
	}

	key, err := hashkey.Open(s.cfg.IDSecrets, s.seals)
	if err != nil {
		return fmt.Errorf("%w: %w; %s", presence.ErrFacts, err, sealedMend)
	}

	s.hashKey = key
	s.cfg.HashKeys.SetHashKey(key)
	return nil
}
