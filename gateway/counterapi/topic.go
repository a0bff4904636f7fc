package counterapi

import (
	"strings"

	"headcount/counter"
	"headcount/presence"
)

// Kind is the kind of topics that are counters.
var Kind = presence.KindOf("counter")

// Topic is the topic of a counter. Key is its name, see presence.Site.Qualify.
func Topic(key string) presence.Topic { return presence.TopicOf(Kind, key) }

// Topics are the topics of counters.
func Topics(keys []string) []presence.Topic {
	topics := make([]presence.Topic, len(keys))
	for i, key := range keys {
		topics[i] = Topic(key)
	}
	return topics
}

// valueOf is a counter as the value of an update: its version, a space, and its
// outside form. Value is only read in this process.
func valueOf(c counter.Counter) string {
	b := append(make([]byte, 0, 160), c.Version.String()...)
	b = append(b, ' ')
	return string(c.AppendMembers(b))
}

// Members are the members of the outside form of the counter in an update, without
// the braces, and its version. It is false when the update has none.
func Members(u presence.Update) (members, version string, ok bool) {
	version, members, ok = strings.Cut(u.Value, " ")
	return members, version, ok
}
