package rowstier

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"headcount/internal/rows"
)

// loadUndrained reads the undrained changes from the fast store, unless this process has owned the partition all along
// and so has them in memory.
func (t *takeover) loadUndrained(ctx context.Context) error {
	t.recordClaim()
	if t.isRenewal {
		return nil // the memory has all undrained changes, even those that the fast store has lost
	}

	found, err := t.readDirtyRows(ctx)
	if err != nil {
		return err
	}
	values, err := t.values(ctx, found.names)
	if err != nil {
		return err
	}
	// An owner that claims again may have a commit in doubt.
	if t.former != 0 {
		if err := t.confirm(ctx); err != nil {
			return err
		}
	}

	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	p.dirty = changes{rows: values, ids: distinct(found.ids), since: time.Now()}
	p.dirtyCommits = found.commits
	p.listed = len(found.names) + len(found.ids)
	p.removals.drained = found.drained
	p.newest = t.claim.Number

	return nil
}

// confirm returns an error if the fast store has changed since the claim. If it has lost data meanwhile, what was read
// lacks commits up to the number of the claim, and the owner would take such a commit for stored.
func (t *takeover) confirm(ctx context.Context) error {
	err := t.s.fast.Commit(ctx, []rows.Commit{probeOf(t.p.id, t.claim.Epoch, t.claim.Number)})[0]
	if err != nil {
		return fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
	}

	return nil
}

// undrained is what the rows of dirtyRows say.
type undrained struct {
	commits []uint64 // that are not drained, as far as the fast store knows
	names   []rows.Name
	ids     []rows.ID
	drained []rows.Name // rows of dirtyRows whose commits are drained
}

// readDirtyRows reads what the fast store records about commits that are not drained.
func (t *takeover) readDirtyRows(ctx context.Context) (found undrained, err error) {
	err = t.s.fast.Scan(ctx, t.p.id, dirtyRows, "", func(field string, b []byte) error {
		var number uint64
		if _, err := fmt.Sscanf(field, "%x", &number); err != nil {
			return errMalformed
		}

		// The durable store has this commit already, or a newer one if the fast store was restored from an older copy.
		if number <= t.durable.drained.upTo {
			found.drained = append(found.drained, dirtyName(number))
			return nil
		}

		names, ids, err := decodeNames(b)
		found.commits = append(found.commits, number)
		found.names = append(found.names, names...)
		found.ids = append(found.ids, ids...)

		return err
	})

	return found, err
}

// recordClaim records the claim, and forgets what this process knew from an earlier claim if another process may have
// owned the partition in between, or if the fast store knows more.
func (t *takeover) recordClaim() {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	// The store grants a claim that names a former claim only if no other process has claimed the partition since. But
	// the fast store may have made a commit whose answer was lost, and it alone knows what that commit changed.
	knowsAll := t.claim.Number <= p.newest
	t.isRenewal = t.former != 0 && p.epoch != 0 && knowsAll
	if !t.isRenewal {
		p.forgetLocked()
	}
	p.epoch = t.claim.Epoch
}

// values returns the newest values of the named rows from the fast store; nil means deleted.
func (t *takeover) values(ctx context.Context, names []rows.Name) (map[rows.Name][]byte, error) {
	// Several commits may have changed the same row. Their newest values are in the fast store.
	values := map[rows.Name][]byte{}
	var addresses []rows.Address
	for _, name := range names {
		if _, again := values[name]; !again {
			values[name] = nil
			addresses = append(addresses, rows.Address{Partition: t.p.id, Name: name})
		}
	}
	if len(addresses) == 0 {
		return values, nil
	}

	for i, row := range t.s.fast.Read(ctx, addresses) {
		if row.Err != nil {
			return nil, row.Err
		}
		if row.Value == nil {
			// A deletion would have left a tombstone. So the row was drained and then evicted.
			if !t.state.complete {
				delete(values, addresses[i].Name)
			}
			continue
		}

		value, err := decodeValue(row.Value)
		if err != nil {
			return nil, t.s.malformed(err, addresses[i])
		}
		values[addresses[i].Name] = value
	}

	return values, nil
}

func distinct(ids []rows.ID) []rows.ID {
	seen := map[[16]byte]bool{}
	var once []rows.ID
	for _, id := range ids {
		if !seen[id.Bytes] {
			seen[id.Bytes] = true
			once = append(once, id)
		}
	}

	return once
}

// finish records the result of the takeover. From here on, this process drains. If the state changed, the owner's next
// commit writes it to the fast store.
func (t *takeover) finish(changed bool) {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()

	t.p.owner = t.owner
	t.p.state = t.state
	t.p.stateChanged = changed
	if t.hasDurable() {
		t.p.claimedDurableLocked(t.durable.claim)
		t.p.drained = t.durable.drained
	}
}

// restore writes to the fast store what it has lost: the rows that changed in the durable store since, and the
// undrained changes of this process. It uses one commit, so the fast store is either repaired or as it was.
func (t *takeover) restore(ctx context.Context) error {
	changed, err := t.changedInDurable(ctx)
	if err != nil {
		return err
	}

	// The lost IDs are not copied from the durable store, because there may be millions. lacksIDsUntil makes admit look
	// them up there.
	now := time.Now()
	t.state.complete = t.hasState && t.state.complete
	t.state.lacksIDsUntil = now.Add(idsLackedFor)
	if t.hasDurable() {
		t.state.syncedTo = t.durable.claim.Number
	}

	commit := rows.Commit{Partition: t.p.id, Epoch: t.claim.Epoch, After: t.claim.Number, At: now}
	// With a number below what was drained, the fast store would seem to have lost data at the next claim.
	t.p.addUndrained(&commit, changed, max(t.durable.drained.upTo, t.claim.Number+1))
	commit.Rows = append(commit.Rows, rows.Row{Name: stateName, Value: t.state.encode()})

	if err := t.write(ctx, &commit); err != nil {
		return fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
	}
	t.p.compared = comparison{}
	t.finish(false)
	t.claim.Number = commit.Number

	return nil
}

// changedInDurable returns the rows that the durable store has and the fast store may have lost. For a fast store
// without a state it returns nothing, because reads fill such a fast store.
func (t *takeover) changedInDurable(ctx context.Context) (map[rows.Name][]byte, error) {
	if !t.hasDurable() || !t.hasState {
		return nil, nil
	}

	is := &t.p.compared
	if is.number != t.durable.claim.Number || is.after != t.state.syncedTo {
		*is = comparison{number: t.durable.claim.Number, after: t.state.syncedTo, changed: map[rows.Name][]byte{}}
	}

	for {
		some, next, err := t.s.durable.Changed(ctx, t.p.id, is.after, is.place)
		if err != nil {
			return nil, err
		}

		for _, row := range some {
			if row.Name != drainedName {
				is.changed[row.Name] = row.Value
			}
		}
		is.place = next
		if next.End {
			return is.changed, nil
		}
	}
}

// write commits c to the fast store, without the IDs that the fast store still has.
func (t *takeover) write(ctx context.Context, c *rows.Commit) error {
	// The fast store has lost some IDs, not all: those that it knows are left out, and the rest is tried again.
	for {
		err := t.s.fast.Commit(ctx, []rows.Commit{*c})[0]
		var known *rows.Known
		if !errors.As(err, &known) {
			return err
		}
		c.IDs = rows.Without(c.IDs, known.IDs)
	}
}

// addUndrained adds the rows that changed in the durable store to a commit of the fast store, overridden by the
// undrained changes. The number of the commit is the partition's newest one, but not lower than least.
func (p *partition) addUndrained(c *rows.Commit, changed map[rows.Name][]byte, least uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	values, ids := p.undrainedLocked()
	newest := map[rows.Name][]byte{}
	maps.Copy(newest, changed)
	maps.Copy(newest, values)
	for name, value := range newest {
		c.Rows = append(c.Rows, rows.Row{Name: name, Value: encodeValue(value)})
	}
	c.IDs = append(c.IDs, ids...)

	c.Number = max(least, p.newest)
	p.newest = c.Number
	p.removals.drained = nil // the fast store may need these rows again
	if len(values)+len(ids) == 0 {
		return
	}

	dirty := rows.Commit{IDs: ids}
	for name := range values {
		dirty.Rows = append(dirty.Rows, rows.Row{Name: name})
	}
	c.Rows = append(c.Rows, rows.Row{Name: dirtyName(c.Number), Value: encodeNames(&dirty)})
	p.dirtyCommits = append(p.dirtyCommits, c.Number)
	p.listed += len(dirty.Rows) + len(ids)
}

// undrainedLocked returns the newest values of all rows that are dirty or being sent, and the IDs.
func (p *partition) undrainedLocked() (values map[rows.Name][]byte, ids []rows.ID) {
	values = map[rows.Name][]byte{}
	if p.sending != nil {
		for _, row := range p.sending.Rows {
			if row.Name != drainedName {
				values[row.Name] = row.Value
			}
		}
		ids = append(ids, p.sending.IDs...)
	}
	maps.Copy(values, p.dirty.rows)

	return values, append(ids, p.dirty.ids...)
}
