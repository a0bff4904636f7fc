package owner

import (
	"encoding/binary"

	"headcount/counter"
)

// publication encodes the draft's changes for watchers: each changed counter, and which members joined and left.
func (d *draft) publication() []byte {
	b := binary.AppendUvarint(nil, uint64(len(d.news)))
	for i := range d.news {
		one := &d.news[i]
		b = appendBytes(b, one.Key)
		// The row has the change, because commit encodes the heads before the publication.
		b = appendBytes(b, d.get(headOf(one.Key)))
		b = appendStrings(b, one.Joined)
		b = appendStrings(b, one.Left)
		b = append(b, flag(one.All))
	}

	return b
}

// anything is a publication that means that any counter of the partition may have changed.
var anything = []byte{}

// Publication calls each with the updates of a publication, oldest first. It returns ErrMalformed for a publication
// that cannot be read, and which may therefore concern any counter.
func Publication(b []byte, each func(counter.Update)) error {
	r := reader{rest: b}
	for range r.count() {
		var u counter.Update
		key := string(r.bytes())
		var h head
		if err := h.decode(r.bytes()); err != nil {
			return err
		}

		u.Counter = h.Counter(key)
		u.Joined = r.strings()
		u.Left = r.strings()
		u.Reread = r.byte() == 1
		if r.malformed {
			break
		}
		each(u)
	}

	return r.end("a publication")
}

// EncodeGained returns the row of a top list.
func EncodeGained(most []counter.Gained) []byte {
	b := binary.AppendUvarint(nil, uint64(len(most)))
	for i := range most {
		b = appendBytes(b, most[i].Key)
		b = binary.AppendVarint(b, most[i].Value)
	}

	return b
}

// DecodeGained decodes the row of a top list. The error is ErrMalformed.
func DecodeGained(b []byte) ([]counter.Gained, error) {
	r := reader{rest: b}
	most := make([]counter.Gained, r.count())
	for i := range most {
		most[i].Key = string(r.bytes())
		most[i].Value = r.int()
	}

	return most, r.end("a top list")
}
