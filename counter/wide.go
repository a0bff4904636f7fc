package counter

import "math/bits"

// Wide is a number of 128 bits: totals and parts fit 64 bits each, and what is between them may not.
type Wide struct {
	high int64
	low  uint64
}

// WideOf returns n.
func WideOf(n int64) Wide { return Wide{high: n >> 63, low: uint64(n)} }

// Plus returns w + n.
func (w Wide) Plus(n int64) Wide { return w.add(WideOf(n)) }

// Minus returns w − n.
func (w Wide) Minus(n int64) Wide { return w.Sub(WideOf(n)) }

// Sub returns w − o.
func (w Wide) Sub(o Wide) Wide {
	low, borrow := bits.Sub64(w.low, o.low, 0)
	high, _ := bits.Sub64(uint64(w.high), uint64(o.high), borrow)

	return Wide{high: int64(high), low: low}
}

func (w Wide) add(o Wide) Wide {
	low, carry := bits.Add64(w.low, o.low, 0)
	high, _ := bits.Add64(uint64(w.high), uint64(o.high), carry)

	return Wide{high: int64(high), low: low}
}

// shifted returns n × 2^32.
func shifted(n int64) Wide { return Wide{high: n >> 32, low: uint64(n) << 32} }

// Value returns the number, and whether it fits 64 bits.
func (w Wide) Value() (n int64, ok bool) {
	n = int64(w.low)

	return n, w.high == n>>63
}
