package owner

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"

	"headcount/counter"
	"headcount/internal/rows"
)

// The members of a set are stored as hashes in rows, concatenated in no particular order. A set grows by linear hashing
// (Litwin, VLDB 1980): when its rows are full on average, one of them is split, so that no change ever moves a whole
// set.
const (
	hashSize    = 11 // bytes of a hash; its last four bits are 0
	membersFull = 96 // average number of members per row above which a row is split
)

// hashOf returns the hash of a member.
func hashOf(member string) [hashSize]byte {
	// The member of an imported set may be known by its hash alone, and then the text is the hash. Its 84 bits are not
	// a whole number of bytes, and a decoder drops the rest, so two digits are added.
	text := counter.MemberHash(member) + "AA"
	var padded [hashSize + 1]byte
	_, _ = base64.RawURLEncoding.Decode(padded[:], []byte(text)) // cannot fail: an import has checked the digits

	return [hashSize]byte(padded[:])
}

// shardOf returns which one of a set's rows has a hash.
func shardOf(hash []byte, shards uint64) uint64 {
	n := uint64(binary.BigEndian.Uint32(hash))
	full := roundUp(shards)
	if at := n % full; at < shards {
		return at
	}

	// That row does not exist yet. Its members are still in the row from which it will be split.
	return n % (full / 2)
}

// roundUp returns the smallest power of two that is at least n.
func roundUp(n uint64) uint64 { return 1 << bits.Len64(n-1) }

// set is the set of one counter within a draft.
type set struct {
	d *draft
	h *head
}

func (d *draft) set(key string) set {
	h := d.head(key)
	h.extend()

	return set{d: d, h: h}
}

// row returns the name of one of the set's rows.
func (s set) row(shard uint64) rows.Name {
	return rows.Name{Collection: setCollection(s.h), Field: strconv.FormatUint(shard, 10)}
}

// setCollection returns the collection of a counter's members or registers. It changes when the set is emptied.
func setCollection(h *head) string {
	return "set:" + strconv.FormatUint(h.life, 36) + "." + strconv.FormatUint(h.emptied, 36) + ":" + h.key
}

func (s set) shards() uint64 { return max(s.h.shards, 1) }

// rowOf returns the name of the row that has a hash if the set does.
func (h *head) rowOf(hash []byte) rows.Name {
	s := set{h: h}

	return s.row(shardOf(hash, s.shards()))
}

// findHash returns the offset of a hash in a row, or -1.
func findHash(row []byte, hash []byte) int {
	for at := 0; at+hashSize <= len(row); at += hashSize {
		if bytes.Equal(row[at:at+hashSize], hash) {
			return at
		}
	}

	return -1
}

// Join implements counter.Tx.
func (d *draft) Join(key, member string) bool {
	s := d.set(key)
	hash := hashOf(member)
	name := s.h.rowOf(hash[:])
	if findHash(d.get(name), hash[:]) >= 0 {
		return false
	}

	d.put(name, append(d.own(name), hash[:]...))
	s.h.parts |= hasSet // Judge also calls Changed, so the head is written
	s.h.members++
	if s.h.members > s.shards()*membersFull {
		s.split()
	}

	return true
}

// Leave implements counter.Tx.
func (d *draft) Leave(key, member string) bool {
	s := d.set(key)
	hash := hashOf(member)
	name := s.h.rowOf(hash[:])
	at := findHash(d.get(name), hash[:])
	if at < 0 {
		return false
	}

	d.put(name, slices.Delete(d.own(name), at, at+hashSize))
	// The rows stay as many as they are, however small they become, until the set is emptied.
	s.h.members--

	return true
}

// split moves some hashes of one row to a new one.
func (s set) split() {
	shards := s.shards()
	// Rows are split in turn and not when they are full, so their number alone says which one has a hash.
	from := shards - roundUp(shards+1)/2

	var stay, move []byte
	row := s.d.get(s.row(from))
	for at := 0; at+hashSize <= len(row); at += hashSize {
		hash := row[at : at+hashSize]
		if shardOf(hash, shards+1) == shards {
			move = append(move, hash...)
		} else {
			stay = append(stay, hash...)
		}
	}

	// Both rows go into the commit of the change that made the set too full.
	s.d.put(s.row(from), stay)
	s.d.put(s.row(shards), move)
	s.h.shards = shards + 1
}

// Empty implements counter.Tx. The old rows of the set become garbage.
func (d *draft) Empty(key string) {
	h := d.set(key).h
	// Rows are named after the version that emptied the set, so nobody finds the old ones before they are swept.
	d.discard(setCollection(h))
	*h.extent = extent{emptied: h.Version.Sequence + 1}
	h.parts &^= hasSet
}
