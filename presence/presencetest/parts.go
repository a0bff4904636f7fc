package presencetest

import "testing"

// Parts has parts of the contract by name, and why a set-up of a store can differ there from those that keep the whole
// contract.
type Parts map[string]string

// RunParts tests parts of the contract.
func RunParts(t *testing.T, some Parts, open Factory) {
	ran := 0
	for _, name := range partNames() {
		if some[name] != "" {
			ran++
			t.Run(name, func(t *testing.T) { run(t, name, open) })
		}
	}

	if ran != len(some) {
		t.Errorf("%d parts of %v are parts of the contract", ran, some)
	}
}
