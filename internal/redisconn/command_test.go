package redisconn

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestAReplyIsKept: when one master of a Cluster fails, go-redis gives its error to all commands of a pipeline, also to
// those that other masters have answered.
func TestAReplyIsKept(t *testing.T) {
	away := errors.New("another master is away")

	answered := scriptCmd{Cmd: redis.NewCmd(t.Context())}
	answered.SetVal("OK")
	answered.SetErr(away)
	if v, err := answered.Result(); v != "OK" || err != nil {
		t.Errorf("what was answered is %v, %v", v, err)
	}

	lost := scriptCmd{Cmd: redis.NewCmd(t.Context())}
	lost.SetErr(away)
	if _, err := lost.Result(); !errors.Is(err, away) {
		t.Errorf("what was not answered is %v", err)
	}
}
