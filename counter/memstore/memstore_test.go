package memstore

import (
	"testing"

	"headcount/counter/storetest"
)

func TestContract(t *testing.T) {
	storetest.Run(t, func(testing.TB) storetest.Instance { return storetest.Instance{Store: New(Config{})} })
}
