package share

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Text returns the parts and the numbers of a share in the form of an export (counter.Copy.Elsewhere):
//
//	deletion emptied[ ~][ region/life/sequence/value/at/base]…
//
// The ~ says that the region has not changed the counter itself.
func (s *Share) Text(changed bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %d", s.Deletion, s.Emptied)
	if !changed {
		b.WriteString(" ~")
	}
	for i := range s.Parts {
		p := &s.Parts[i]
		fmt.Fprintf(&b, " %s/%d/%d/%d/%d/%d", p.Region, p.Life, p.Sequence, p.Value, p.At, p.Base)
	}

	return b.String()
}

// ParseText parses the result of Text, and that of older releases, which left out the value of the region's own part.
// The error is ErrMalformed.
func ParseText(text string) (s Share, changed bool, err error) {
	fields := strings.Fields(text)
	if len(fields) < 2 {
		return Share{}, false, ErrMalformed
	}
	changed = true

	s.Deletion, err = strconv.ParseUint(fields[0], 10, 64)
	if err == nil {
		s.Emptied, err = strconv.ParseUint(fields[1], 10, 64)
	}
	for _, field := range fields[2:] {
		if field == "~" {
			changed = false
			continue
		}
		var p Part
		if err == nil {
			p, err = parsePart(field)
		}
		at, known := s.find(p.Region, p.Life)
		// A part that is there twice must not count twice.
		if !known {
			s.Parts = slices.Insert(s.Parts, at, p)
		}
	}
	if err != nil {
		return Share{}, false, fmt.Errorf("%w: %w", ErrMalformed, err)
	}

	return s, changed, nil
}

func parsePart(text string) (p Part, err error) {
	fields := strings.Split(text, "/")
	if len(fields) != 6 {
		return Part{}, fmt.Errorf("%d fields of a part", len(fields))
	}

	p.Region = fields[0]
	for at, to := range map[int]*uint64{1: &p.Life, 2: &p.Sequence, 4: &p.At} {
		if err == nil {
			*to, err = strconv.ParseUint(fields[at], 10, 64)
		}
	}
	for at, to := range map[int]*int64{3: &p.Value, 5: &p.Base} {
		if err == nil {
			*to, err = strconv.ParseInt(fields[at], 10, 64)
		}
	}

	return p, err
}
