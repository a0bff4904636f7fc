package owner

import (
	"headcount/counter"
	"headcount/internal/rows"
)

// ExactPartition has all exact counters, so that a batch of them is one commit. Every other counter is in the partition
// of its key. So when a rule changes its kind, the counters that it had are in a place where nobody looks, and must not
// begin anew in the other one.
const ExactPartition = 0

// Outside is the partition of the exact counters that are in no store of rows, see Config.ExactOutside. A store is
// asked for heads in it before a counter is made.
const Outside = rows.Partitions

// beside is the collection, within a draft, of the heads that keys have in their other place.
const beside = "beside"

// otherPlace returns the other partition that may have a key, beside the one where it is expected, and whether there is
// one.
func otherPlace(key string, expected int) (partition int, ok bool) {
	partition = rows.PartitionOf(key)
	if partition == expected {
		partition = ExactPartition
	}

	return partition, partition != expected
}

// otherPlace returns the other partition that may have a key, and whether there is one.
func (d *draft) otherPlace(key string) (partition int, ok bool) {
	if d.p.exactOutside {
		return Outside, true
	}

	return otherPlace(key, d.p.id)
}

// address returns where the store has a row of the draft.
func (d *draft) address(name rows.Name) rows.Address {
	if name.Collection != beside {
		return rows.Address{Partition: d.p.id, Name: name}
	}

	partition, _ := d.otherPlace(name.Field)

	return rows.Address{Partition: partition, Name: headOf(name.Field)}
}

// misplaced returns the conflict of a change that would begin a counter anew, or nil.
func (d *draft) misplaced(key string) error {
	_, ok := d.otherPlace(key)
	if !ok {
		return nil
	}

	// A row of another partition. Its owner may change it, so it is read anew for each turn.
	other := head{key: key}
	err := other.decode(d.get(rows.Name{Collection: beside, Field: key}))
	if err != nil || other.Kind == 0 {
		return err
	}

	return counter.Misplaced(other.Counter(key))
}
