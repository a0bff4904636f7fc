package presence

import (
	"strconv"
	"strings"
)

// KindCount is the kind of the count of users of a page, or of a whole site. The value is
// "users updated" or "users updated without": updated is in unix seconds, or 0, and
// without is Count.Without.
var KindCount = KindOf("count")

// CountTopic returns the topic of the page's count. page is a qualified name.
func CountTopic(page string) Topic { return TopicOf(KindCount, page) }

// CountTopics returns the topics of the pages' counts, in the order of pages.
func CountTopics(pages []string) []Topic {
	topics := make([]Topic, len(pages))
	for i, page := range pages {
		topics[i] = CountTopic(page)
	}

	return topics
}

// Update returns the count as it is published.
func (c Count) Update() Update {
	value := make([]byte, 0, 40+len(c.Without))
	value = strconv.AppendInt(value, c.Users, 10)
	value = append(value, ' ')
	value = strconv.AppendInt(value, Seconds(c.Updated), 10)
	if c.Without != "" {
		value = append(append(value, ' '), c.Without...)
	}

	return Update{Topic: CountTopic(c.Page), Version: c.Version, Stale: c.Stale, Value: string(value)}
}

// CountOf parses what Count.Update wrote. ok is false when u is not a count.
func CountOf(u Update) (c Count, ok bool) {
	c = Count{Page: u.Name(), Version: u.Version, Stale: u.Stale}
	// A count that was never published has no value, and no users.
	if u.Kind != KindCount || u.Value == "" {
		return c, u.Kind == KindCount
	}

	users, rest, _ := strings.Cut(u.Value, " ")
	updated, without, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseInt(users, 10, 64)
	sec, err2 := strconv.ParseInt(updated, 10, 64)

	// Another process may have sent it, so nothing is taken for granted.
	if err != nil || err2 != nil || n < 0 || sec < 0 {
		return c, false
	}

	c.Users = n
	c.Updated = TimeOf(sec)
	c.Without = without
	return c, true
}
