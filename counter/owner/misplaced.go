package owner

import (
	"headcount/counter"
	"headcount/internal/rows"
)

// ExactPartition has all exact counters, so that a batch of them is one commit. Every other counter is in the partition
// of its key. When a rule changes its kind from or to exact, its existing counters are therefore in the wrong
// partition. They must not be created anew in the other one.
const ExactPartition = 0

// Outside stands for the place of exact counters that no store of rows has, see Config.ExactOutside. Before a counter
// is created, the store is asked for a head in this partition.
const Outside = rows.Partitions

// beside is the collection, within a draft, of heads that are in the other partition that may have their key.
const beside = "beside"

// otherPlace returns the partition, other than the expected one, that may have a key, and whether there is one.
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

// address returns the address in the store of a row of the draft.
func (d *draft) address(name rows.Name) rows.Address {
	if name.Collection != beside {
		return rows.Address{Partition: d.p.id, Name: name}
	}

	partition, _ := d.otherPlace(name.Field)

	return rows.Address{Partition: partition, Name: headOf(name.Field)}
}

// misplaced returns the conflict of a change that would create a counter which already exists in another partition, or
// nil.
func (d *draft) misplaced(key string) error {
	_, ok := d.otherPlace(key)
	if !ok {
		return nil
	}

	// The row belongs to another partition, whose owner may change it, so it is read again in each turn.
	other := head{key: key}
	err := other.decode(d.get(rows.Name{Collection: beside, Field: key}))
	if err != nil || other.Kind == 0 {
		return err
	}

	return counter.Misplaced(other.Counter(key))
}
