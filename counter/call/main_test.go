package call_test

import (
	"testing"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
