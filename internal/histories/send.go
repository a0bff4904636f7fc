package histories

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"headcount/client"
)

// Rules are the rules of counters that servers need for the subjects.
var Rules = fmt.Sprintf(`{"rules":[
	{"match":"exact:*","kind":"exact","floor":%d,"ceiling":%d},
	{"match":"sum:*","kind":"sum"},
	{"match":"members:*","kind":"members","stale":"0s"}
]}`, floor, ceiling)

// key returns the name of a counter of the subject.
func (s *Subject) key(at int) string { return fmt.Sprintf("%s/%d", s.Name, at) }

// errUnexpected means an answer that no fault explains.
var errUnexpected = errors.New("unexpected answer")

// send makes a call. Its error wraps errUnexpected after a wrong answer; any other error means that there was no
// answer.
func (s *Subject) send(ctx context.Context, api *client.API, c *Call) (Answer, error) {
	if c.Keyed {
		api = api.Once(fmt.Sprintf("%s#%d", s.Name, c.ID))
	}

	answer, err := s.ask(ctx, api, c)
	refused := (*client.Error)(nil)
	isRefused := errors.As(err, &refused)
	isConflict := isRefused && refused.Status == http.StatusConflict
	isAway := !isRefused || refused.Temporary()

	switch {
	case err == nil:
		return answer, nil
	case isConflict:
		return s.refused(refused)
	case errors.Is(err, client.ErrFrame): // no fault of a network causes an answer that cannot be parsed
		return Answer{}, fmt.Errorf("%w: %w", errUnexpected, err)
	case isAway:
		return Answer{}, err
	default:
		return Answer{}, fmt.Errorf("%w: %w", errUnexpected, err)
	}
}

// refused returns the answer of a counter at fault.
func (s *Subject) refused(by *client.Error) (Answer, error) {
	for at := range numbers {
		if s.key(at) == by.Key {
			return Answer{Refused: true, Fault: at, Values: []int64{by.Value}}, nil
		}
	}

	return Answer{}, fmt.Errorf("%w: %w of %q", errUnexpected, by, by.Key)
}

func (s *Subject) ask(ctx context.Context, api *client.API, c *Call) (Answer, error) {
	switch {
	case s.Model == Limit:
		return s.askLimit(ctx, api, c)
	case c.Verb == Read:
		return one(api.Exact(ctx, s.key(c.At)))
	case c.Verb == Look:
		return member(api.Member(ctx, s.key(0), memberName(c.At)))
	case c.Verb == Set:
		return one(api.Set(ctx, s.key(c.At), c.Value, "a history", "a client"))
	case c.Verb == Edit:
		return s.edit(ctx, api, c)
	case len(c.Deltas) > 1:
		return s.batch(ctx, api, c)
	}

	key, by := s.key(c.Deltas[0].At), c.Deltas[0].By
	if by < 0 {
		return one(api.Decrement(ctx, key, -by))
	}

	return one(api.Increment(ctx, key, by))
}

func one(c client.Counter, err error) (Answer, error) {
	return Answer{Replay: c.Replayed, Values: []int64{c.Value}}, err
}

func member(c client.Counter, err error) (Answer, error) {
	answer := Answer{Values: []int64{c.Value, 0}}
	if err == nil && *c.Member {
		answer.Values[1] = 1
	}

	return answer, err
}

func (s *Subject) batch(ctx context.Context, api *client.API, c *Call) (Answer, error) {
	changes := make([]client.Change, len(c.Deltas))
	for i, d := range c.Deltas {
		changes[i] = client.Change{Key: s.key(d.At), Delta: d.By}
	}
	counters, err := api.Change(ctx, changes...)
	if err != nil {
		return Answer{}, err
	}

	answer := Answer{Replay: counters[0].Replayed}
	for i := range counters {
		answer.Values = append(answer.Values, counters[i].Value)
	}

	return answer, nil
}

func memberName(at int) string { return string(rune('a' + at)) }

func memberNames(set uint8) (names []string) {
	for at := range members {
		if set&(1<<at) != 0 {
			names = append(names, memberName(at))
		}
	}

	return names
}

func (s *Subject) edit(ctx context.Context, api *client.API, c *Call) (Answer, error) {
	join, leave := memberNames(c.Join), memberNames(c.Leave)
	switch {
	case !c.One:
		return one(api.EditMembers(ctx, s.key(0), join, leave))
	case len(join) > 0:
		return one(api.AddMember(ctx, s.key(0), join[0]))
	default:
		return one(api.RemoveMember(ctx, s.key(0), leave[0]))
	}
}

func (s *Subject) askLimit(ctx context.Context, api *client.API, c *Call) (Answer, error) {
	// No test lasts a day, so no cost leaves the window.
	of := client.Limit{Limit: permits, Window: 24 * time.Hour, Algorithm: "log", Cost: c.Value}
	ask := api.Limit
	if c.Verb == Read {
		ask = api.LookAtLimit
	}
	verdict, err := ask(ctx, s.key(0), of)

	return Answer{Refused: !verdict.Allowed, Values: []int64{verdict.Remaining}}, err
}

// isUnsent reports whether a call that failed has certainly not reached a server.
func isUnsent(err error) bool {
	op := (*net.OpError)(nil)

	return errors.Is(err, errNowhere) || errors.As(err, &op) && op.Op == "dial"
}

// counters returns the counters of a subject that can be read.
func (s *Subject) counters() []int {
	if s.Model == Exact {
		return []int{0, 1, 2}
	}

	return []int{0}
}
