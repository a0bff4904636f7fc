package owner

import "headcount/internal/rows"

// table is a small map of rows that keeps their insertion order.
type table struct {
	list  []entry
	index map[rows.Name]int // by name; empty while the list is short
}

// entry is a row in a draft.
type entry struct {
	name      rows.Name
	committed []byte // as of the partition's newest commit
	value     []byte // as the draft has it

	unknown bool // committed was not looked up
	missing bool // committed must be read from the store
	cached  bool // committed was in memory
	written bool // the draft has set value
	own     bool // the draft may modify value in place
}

// short is the length up to which searching a list is faster than a map.
const short = 8

// find returns the index of a row, or -1.
func (t *table) find(name rows.Name) int {
	if len(t.list) > short {
		at, ok := t.index[name]
		if !ok {
			return -1
		}
		return at
	}

	for at := range t.list {
		if t.list[at].name == name {
			return at
		}
	}

	return -1
}

// add adds a row that is not in the table, and returns its index.
func (t *table) add(e entry) int {
	at := len(t.list)
	t.list = append(t.list, e)
	switch {
	case at > short:
		t.index[e.name] = at
	// From this length on find uses the index, so it must contain all rows.
	case at == short:
		t.index = make(map[rows.Name]int, 4*short)
		for i := range t.list {
			t.index[t.list[i].name] = i
		}
	}

	return at
}

// reset empties the table.
func (t *table) reset() {
	clear(t.list)
	t.list = t.list[:0]
	t.index = nil
}
