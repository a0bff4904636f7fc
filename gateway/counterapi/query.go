package counterapi

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
)

// Query parses the parameters of a request. Err returns the error of the first invalid one; after that all parameters
// are zero.
type Query struct {
	url.Values
	Err error
}

// ReadQuery returns the parameters of the request.
func ReadQuery(c *gin.Context, example string) *Query {
	// URL.Query would leave out what it cannot read.
	values, err := url.ParseQuery(c.Request.URL.RawQuery)
	q := &Query{Values: values}
	if err != nil {
		q.refuse("The query cannot be read: " + err.Error() + ". Ask as " + example + ", percent-encoded.")
	}

	return q
}

func (q *Query) refuse(detail string) {
	if q.Err == nil {
		q.Err = calls.Bad(detail)
	}
}

// Several returns the values of a repeated parameter in order, without duplicates: 1 to counter.MaxKeys, each of which
// passes check. things is their name in error messages.
func Several(c *gin.Context, name, things string, check func(string) error) ([]string, error) {
	example := "?" + name + "=a&" + name + "=b"
	q := ReadQuery(c, example)
	if q.Err != nil {
		return nil, q.Err
	}

	var list []string
	for _, value := range q.Values[name] {
		// Repetitions do not count, so that a client may ask for its keys as it has them.
		if slices.Contains(list, value) {
			continue
		}
		if err := check(value); err != nil {
			return nil, calls.Bad(err.Error())
		}

		list = append(list, value)
		// One too many is enough to know.
		if len(list) > counter.MaxKeys {
			break
		}
	}

	if len(list) == 0 || len(list) > counter.MaxKeys {
		return nil, calls.Bad(fmt.Sprintf("Ask for 1 to %d distinct %s, as %s.", counter.MaxKeys, things, example))
	}

	return list, nil
}

// optional parses a parameter, or returns otherwise if it was not sent. thing is its name in error messages.
func optional[T any](
	q *Query, name, thing string, otherwise T, parse func(string) (value T, ok bool),
) (value T) {
	given := q.Values[name]
	switch {
	case q.Err != nil:
		return value
	case len(given) == 0:
		return otherwise
	}

	read, ok := parse(given[0])
	// Of several values all but one would be ignored without a word.
	if !ok || len(given) > 1 {
		q.refuse(fmt.Sprintf("%q is one %s, or left out.", name, thing))
		return value
	}

	return read
}

// Number returns a parameter that is a whole number from least to most, or otherwise if it was not sent.
func (q *Query) Number(name string, otherwise, least, most uint64) uint64 {
	thing := fmt.Sprintf("whole number from %d to %d", least, most)

	return optional(q, name, thing, otherwise, func(text string) (uint64, bool) {
		n, err := strconv.ParseUint(text, 10, 64)
		return n, err == nil && n >= least && n <= most
	})
}

// Choice returns a parameter that is one of several words, or the first of them if it was not sent.
func (q *Query) Choice(name string, words ...string) string {
	return optional(q, name, "of "+strings.Join(words, " and "), words[0], func(text string) (string, bool) {
		return text, slices.Contains(words, text)
	})
}

// id returns a parameter that is an id, or nothing if it was not sent.
func (q *Query) id(name string) string {
	return optional(q, name, "id, such as the next of the answer before", "", func(text string) (string, bool) {
		return text, counter.CheckMember(text) == nil
	})
}

// moment returns a parameter that is a time, or zero if it was not sent.
func (q *Query) moment(name string) time.Time {
	const thing = "time such as 2030-10-10T12:00:00Z, percent-encoded"

	return optional(q, name, thing, time.Time{}, func(text string) (time.Time, bool) {
		at, err := time.Parse(time.RFC3339, text)
		return at, err == nil && !at.IsZero()
	})
}

// Duration returns a parameter that is a duration, or 0 if it was not sent.
func (q *Query) Duration(name string) time.Duration {
	return optional(q, name, "duration such as 5m, 1h or 7d", 0, func(text string) (time.Duration, bool) {
		d, err := counter.ParseDuration(text)
		return d, err == nil && d > 0
	})
}

// needed is Duration for a required parameter.
func (q *Query) needed(name, example string) time.Duration {
	d := q.Duration(name)
	if d == 0 {
		q.refuse(fmt.Sprintf("%q is missing; ask as %s.", name, example))
	}

	return d
}
