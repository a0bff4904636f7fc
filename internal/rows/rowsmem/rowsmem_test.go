package rowsmem_test

import (
	"testing"

	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
	"headcount/internal/rows/rowstest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestContract(t *testing.T) {
	rowstest.RunInBubble(t, func(*testing.T) rows.Store { return rowsmem.New(rowsmem.Config{}) })
}
