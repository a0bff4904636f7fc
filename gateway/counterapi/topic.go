package counterapi

import (
	"strings"

	"headcount/counter"
	"headcount/presence"
)

// Kind is the kind of the topics of counters.
var Kind = presence.KindOf("counter")

// Topic returns the topic of a counter. key is its name, see presence.Site.Qualify.
func Topic(key string) presence.Topic { return presence.TopicOf(Kind, key) }

// valueOf returns a counter as the value of an update: its version, a space, and the
// members of its JSON object. Only this process reads it.
func valueOf(c counter.Counter) string {
	b := append(make([]byte, 0, 160), c.Version.String()...)
	b = append(b, ' ')
	return string(c.AppendMembers(b))
}

// Members returns the members of the JSON object of the counter in an update, without the
// braces, and the counter's version. ok is false if the update has none.
func Members(u presence.Update) (members, version string, ok bool) {
	version, members, ok = strings.Cut(u.Value, " ")
	return members, version, ok
}
