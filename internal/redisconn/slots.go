package redisconn

// Slots is the number of hash slots of a Redis Cluster.
const Slots = 16384

// slotOf returns the slot of the keys with a hash tag: the tag's CRC-16 (XMODEM) modulo Slots.
func slotOf(tag []byte) int {
	const polynomial = 0x1021

	crc := uint16(0)
	for _, b := range tag {
		crc ^= uint16(b) << 8
		for range 8 {
			carry := crc&0x8000 != 0
			crc <<= 1
			if carry {
				crc ^= polynomial
			}
		}
	}

	return int(crc) % Slots
}

// EvenTags returns n hash tags, at most Slots, whose slots are evenly spaced: tag i has the slot in the middle of the
// i-th of n equal parts. So no master of a Cluster that has its share of adjacent slots has more than its share of the
// tags, rounded up; tags that are only numbered leave some masters with three times their share. Each tag is the first
// one with its slot, shorter ones first, of those that begin with prefix and go on with lower-case letters.
//
// The result never changes, because data is stored under it.
func EvenTags(prefix string, n int) []string {
	wanted := make(map[int]int, n) // from the slot to the number of the tag
	for i := range n {
		wanted[(2*i+1)*Slots/(2*n)] = i
	}

	tags := make([]string, n)
	tag := []byte(prefix)
	// Short tags come first, and one in 16,384 has a given slot: this takes milliseconds for 64 of them.
	for len(wanted) > 0 {
		tag = next(tag, len(prefix))
		slot := slotOf(tag)
		if i, ok := wanted[slot]; ok {
			tags[i] = string(tag)
			delete(wanted, slot)
		}
	}

	return tags
}

// next returns the tag that follows tag, in the order of lengths and then of letters. It keeps the first fixed bytes.
func next(tag []byte, fixed int) []byte {
	for i := len(tag) - 1; i >= fixed; i-- {
		if tag[i] < 'z' {
			tag[i]++
			return tag
		}
		tag[i] = 'a'
	}

	return append(tag, 'a') // all were z, and are a
}
