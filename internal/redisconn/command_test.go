package redisconn

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
)

// TestAReplyIsKept: if one master of a Cluster fails, go-redis gives its error to all commands of a pipeline, even
// those that other masters have answered. These keep their replies.
func TestAReplyIsKept(t *testing.T) {
	away := errors.New("another master is away")

	answered := scriptCmd{Cmd: redis.NewCmd(t.Context())}
	answered.SetVal("OK")
	answered.SetErr(away)
	if v, err := answered.Result(); v != "OK" || err != nil {
		t.Errorf("the answered command has %v, %v; want OK", v, err)
	}

	lost := scriptCmd{Cmd: redis.NewCmd(t.Context())}
	lost.SetErr(away)
	if _, err := lost.Result(); !errors.Is(err, away) {
		t.Errorf("the unanswered command has the error %v", err)
	}
}
