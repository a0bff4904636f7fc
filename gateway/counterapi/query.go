package counterapi

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
)

// Query returns the parameters of the request. If it returns false, it has written the error answer.
func Query(c *gin.Context, example string) (url.Values, bool) {
	values, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		problem(c, http.StatusBadRequest, "The query cannot be read: "+err.Error()+". Ask as "+example+", percent-encoded.")
	}
	return values, err == nil
}

// Several returns the values of a parameter that the request repeats, in order and each once: 1 to counter.MaxKeys, all of
// which check accepts. things says what they are. If ok is false, it has written the error answer.
func Several(c *gin.Context, name, things string, check func(string) error) (list []string, ok bool) {
	example := "?" + name + "=a&" + name + "=b"
	values, ok := Query(c, example)
	if !ok {
		return nil, false
	}
	for _, value := range values[name] {
		if slices.Contains(list, value) {
			continue
		}
		if err := check(value); err != nil {
			problem(c, http.StatusBadRequest, err.Error())
			return nil, false
		}
		if list = append(list, value); len(list) > counter.MaxKeys {
			break
		}
	}
	if len(list) == 0 || len(list) > counter.MaxKeys {
		problem(c, http.StatusBadRequest, fmt.Sprintf("Ask for 1 to %d distinct %s, as %s.", counter.MaxKeys, things, example))
		return nil, false
	}
	return list, true
}

// optional returns a parameter as parse reads it, or otherwise if it was not sent. thing says what it is. If ok is false, it
// has written the error answer.
func optional[T any](c *gin.Context, values url.Values, name, thing string, otherwise T, parse func(string) (value T, ok bool)) (value T, ok bool) {
	given := values[name]
	if len(given) == 0 {
		return otherwise, true
	}
	if value, ok = parse(given[0]); !ok || len(given) > 1 {
		problem(c, http.StatusBadRequest, fmt.Sprintf("%q is one %s, or left out.", name, thing))
		return value, false
	}
	return value, true
}

// Number returns a parameter that is a whole number from least to most, or otherwise if it was not sent.
// If ok is false, it has written the error answer.
func Number(c *gin.Context, values url.Values, name string, otherwise, least, most uint64) (n uint64, ok bool) {
	return optional(c, values, name, fmt.Sprintf("whole number from %d to %d", least, most), otherwise, func(text string) (uint64, bool) {
		n, err := strconv.ParseUint(text, 10, 64)
		return n, err == nil && n >= least && n <= most
	})
}

// moment returns a parameter that is a time, or zero if it was not sent.
func moment(c *gin.Context, values url.Values, name string) (at time.Time, ok bool) {
	return optional(c, values, name, "time such as 2030-10-10T12:00:00Z, percent-encoded", at, func(text string) (time.Time, bool) {
		at, err := time.Parse(time.RFC3339, text)
		return at, err == nil && !at.IsZero()
	})
}

// Duration returns a parameter that is a duration, or 0 if it was not sent. If ok is false, it has written the error answer.
func Duration(c *gin.Context, values url.Values, name string) (d time.Duration, ok bool) {
	return optional(c, values, name, "duration such as 5m, 1h or 7d", 0, func(text string) (time.Duration, bool) {
		d, err := counter.ParseDuration(text)
		return d, err == nil && d > 0
	})
}
