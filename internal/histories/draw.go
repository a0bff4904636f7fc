package histories

import "math/rand/v2"

// draw returns a call that a client may make next.
func (m *Model) draw(r *rand.Rand) Call {
	n := r.IntN(100)
	switch m {
	case Exact:
		return drawExact(r, n)
	case Sum:
		return drawSum(r, n)
	case Members:
		return drawMembers(r, n)
	default:
		return drawLimit(r, n)
	}
}

// keyed gives two of three calls an Idempotency-Key. Without one, nobody learns whether a call without an answer has
// taken effect.
func keyed(r *rand.Rand, c Call) Call {
	c.Keyed = r.IntN(3) > 0

	return c
}

func drawExact(r *rand.Rand, n int) Call {
	at := r.IntN(numbers)
	switch {
	case n < 25:
		return Call{Verb: Read, At: at}
	case n < 35:
		return keyed(r, Call{Verb: Set, At: at, Value: r.Int64N(ceiling + 1)})
	case n < 55:
		return keyed(r, Call{Verb: Add, Deltas: someDeltas(r, 2+r.IntN(3))})
	default:
		return keyed(r, Call{Verb: Add, Deltas: someDeltas(r, 1)})
	}
}

func someDeltas(r *rand.Rand, n int) []Delta {
	deltas := make([]Delta, n)
	for i := range deltas {
		by := 1 + r.Int64N(9)
		if r.IntN(2) == 0 {
			by = -by
		}
		deltas[i] = Delta{At: r.IntN(numbers), By: by}
	}

	return deltas
}

func drawSum(r *rand.Rand, n int) Call {
	if n < 35 {
		return Call{Verb: Read}
	}

	by := 1 + r.Int64N(1000)
	if n < 60 {
		by = -by
	}

	return keyed(r, Call{Verb: Add, Deltas: []Delta{{By: by}}})
}

func drawMembers(r *rand.Rand, n int) Call {
	member := r.IntN(members)
	switch {
	case n < 20:
		return Call{Verb: Read}
	case n < 45:
		return Call{Verb: Look, At: member}
	case n < 60:
		return Call{Verb: Edit, One: true, Join: 1 << member}
	case n < 75:
		return Call{Verb: Edit, One: true, Leave: 1 << member}
	default:
		some := uint8(1 + r.IntN(1<<members-1))
		// Nobody both joins and leaves in one call, which the server would refuse.
		join := uint8(r.IntN(1<<members)) & some
		return keyed(r, Call{Verb: Edit, Join: join, Leave: some &^ join})
	}
}

func drawLimit(r *rand.Rand, n int) Call {
	switch {
	case n < 25:
		return Call{Verb: Read}
	case n < 60:
		return Call{Verb: Take, Value: 1 + r.Int64N(3)}
	default:
		return Call{Verb: Take, Value: -1 - r.Int64N(3)}
	}
}
