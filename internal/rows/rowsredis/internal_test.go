package rowsredis

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
)

// TestNoReplyIsNoRow: a server of a Cluster that refuses the connection must not look like one without rows.
func TestNoReplyIsNoRow(t *testing.T) {
	one := &read{fields: []string{"x"}, places: []int{0}, cmd: redis.NewSliceCmd(t.Context())}
	found := make([]rows.Found, 1)
	one.finish(nil, found)
	if !errors.Is(found[0].Err, rows.ErrUnavailable) {
		t.Errorf("got %q, %v, want that the store is unavailable", found[0].Value, found[0].Err)
	}
}

// TestCommitsAreGrouped: small commits to one server share a call, and in a Cluster each has its own.
func TestCommitsAreGrouped(t *testing.T) {
	sizes := []int{maxArgs - 1, 1, 1, maxArgs + 1, 1}
	args := func(i int) int { return sizes[i] }

	want := []span{{0, 2}, {2, 3}, {3, 4}, {4, 5}}
	if got := groups(&client{}, len(sizes), args); !slices.Equal(got, want) {
		t.Errorf("on one server: got %v, want %v", got, want)
	}

	cluster := &client{Cluster: &redis.ClusterClient{}}
	if got := groups(cluster, 2, args); !slices.Equal(got, []span{{0, 1}, {1, 2}}) {
		t.Errorf("on a Cluster: got %v, want one for each", got)
	}
}

// TestTagsStay pins the hash tags of partitions, under which data is stored.
func TestTagsStay(t *testing.T) {
	tags := redisconn.EvenTags("r", rows.Partitions)
	want := strings.Fields(`
		rknd rbcyc rswm rnk rbiwm riir rbhel ryyc rgkq rbgun rfyp rbfgo rberx relg rblia rafrt
		rrtn rbcha rjmg rbjsx rbaow raqh rbhtn rhjq rgzs rbgdl rfhr rbfvm rbecz ragqw rblxc rdod
		rbcxs rcfl rbbjr rbtm raaz rbxtm rhzc rbqot rbvvn rgja rbnog rnqx remw rbesh rlvn rbdai
		rbciq rcwn rbjrh rbeo rapx rbang rhka rbywn rbold rvys rbwum rfib rmum rbebj rdnt rbdpk`)
	if !slices.Equal(tags, want) {
		t.Errorf("the hash tags of partitions have changed to %q", tags)
	}
}

// TestAReadThatWasAnsweredStands: go-redis gives the error of one master of a Cluster to all commands of a pipeline.
// Commands that were answered keep their answers.
func TestAReadThatWasAnsweredStands(t *testing.T) {
	away := errors.New("another master is away")
	one := &read{fields: []string{"a", "b"}, places: []int{0, 1}, cmd: redis.NewSliceCmd(t.Context())}
	one.cmd.SetVal([]any{"x", nil})
	one.cmd.SetErr(away)

	found := make([]rows.Found, 2)
	one.finish(nil, found)
	if found[0].Err != nil || string(found[0].Value) != "x" || found[1].Err != nil || found[1].Value != nil {
		t.Errorf("the answered reads are %+v, want x and no row", found)
	}

	one.cmd = redis.NewSliceCmd(t.Context())
	one.cmd.SetErr(away)
	if err := one.err(); !errors.Is(err, away) {
		t.Errorf("the error of the unanswered read is %v, want %v", err, away)
	}
}
