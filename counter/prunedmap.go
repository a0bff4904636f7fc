package counter

import (
	"maps"
	"slices"
	"strings"
)

const maxPruned = 4 * TopMost // keys of a pruned map

// prunedMap estimates the sum of each key within a bounded map: the summary of Misra and Gries (Finding Repeated
// Elements, 1982), whose error bound is that of Space-Saving (Agarwal et al., Mergeable Summaries, 2012). When the
// map is full, the median is subtracted from all keys, and keys that have nothing left are deleted. So the true sum of
// a key is between keys[key] and keys[key] + missed. Each time missed grows by n, half of the keys lose n, so missed
// is at most 2/maxPruned, a 2,000th, of the total.
type prunedMap struct {
	total, missed int64
	keys          map[string]int64
}

// add adds n to key and returns the upper bound of its sum.
func (p *prunedMap) add(key string, n int64) int64 {
	p.total = Saturated(p.total, n)
	gained, isKnown := p.keys[key]
	if !isKnown && len(p.keys) >= maxPruned {
		// At least half of the keys go at once, so the sort is rare.
		p.missed = Saturated(p.missed, prune(p.keys))
	}
	if !isKnown {
		key = strings.Clone(key) // it may be a slice of a request
	}

	gained = Saturated(gained, n)
	p.keys[key] = gained

	return Saturated(gained, p.missed)
}

// prune subtracts the median from all keys, deletes those that have nothing left, and returns the median.
func prune(keys map[string]int64) int64 {
	all := slices.AppendSeq(make([]int64, 0, len(keys)), maps.Values(keys))
	slices.Sort(all)

	median := all[len(all)/2]
	for key, n := range keys {
		if n > median {
			keys[key] = n - median
		} else {
			delete(keys, key)
		}
	}

	return median
}
