package conn

import (
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Counts are rounded to significant digits.
func TestSignificant(t *testing.T) {
	for _, tc := range []struct {
		n      int64
		digits uint8
		want   int64
	}{
		{0, 1, 0}, {7, 1, 7}, {14, 1, 10}, {15, 1, 20}, {95, 1, 100}, {94, 1, 90}, {994, 2, 990}, {995, 2, 1000},
		{1249, 2, 1200}, {123456, 3, 123000},
		{123456, 0, 123456}, {123456, 6, 123456}, {123456, 9, 123456}, {1<<63 - 1, 1, 9_000_000_000_000_000_000},
		{1<<63 - 1, 2, 9_200_000_000_000_000_000},
	} {
		if got := significant(tc.n, tc.digits); got != tc.want {
			t.Errorf("significant(%d, %d) = %d, want %d", tc.n, tc.digits, got, tc.want)
		}
	}

	// For all numbers: rounding keeps their order, leaves few digits, is idempotent, and is not far off.
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.Int64Range(0, 1<<60).Draw(t, "a"), rapid.Int64Range(0, 1<<60).Draw(t, "b")
		digits := uint8(rapid.IntRange(1, maxPrecision).Draw(t, "digits"))
		ra, rb := significant(a, digits), significant(b, digits)

		if a <= b && ra > rb {
			t.Fatalf("%d and %d are rounded to %d and %d", a, b, ra, rb)
		}
		if text := strings.TrimRight(strconv.FormatInt(ra, 10), "0"); len(text) > int(digits) {
			t.Fatalf("significant(%d, %d) = %d has more digits", a, digits, ra)
		}
		if significant(ra, digits) != ra || float64(max(ra-a, a-ra)) > 0.5*float64(a) {
			t.Fatalf("significant(%d, %d) = %d, which changes when it is rounded again, or is off by half",
				a, digits, ra)
		}
	})
}
