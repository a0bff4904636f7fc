package unread

import (
	"strconv"
	"strings"

	"headcount/presence"
)

var (
	// KindLevel is the kind of a page's level. The version is the level's
	// incarnation and All; the value is "by at", with at in unix seconds.
	KindLevel = presence.KindOf("level")
	// KindRecord is the kind of a user's record. The version is the version of the record;
	// the value is the time when the record was updated, in unix seconds. A receiver that
	// needs the follows reads them from the Store.
	KindRecord = presence.KindOf("record")
)

// LevelTopic returns the topic of the page's level, which is in the bucket of the page.
// page is a qualified name.
func LevelTopic(page string) presence.Topic { return presence.TopicOf(KindLevel, page) }

// RecordTopic returns the topic of the user's record. It needs no site: users of different
// sites have different hashes.
func RecordTopic(user User) presence.Topic {
	return presence.Topic{Site: presence.DefaultSite, Kind: KindRecord, Key: user.String()}
}

// Update returns the level as it is published.
func (l Level) Update(page string) presence.Update {
	value := strconv.AppendInt(make([]byte, 0, 40), l.By, 10)
	value = append(value, ' ')
	value = strconv.AppendInt(value, presence.Seconds(l.At), 10)

	return presence.Update{
		Topic: LevelTopic(page), Value: string(value),
		Version: presence.Version{Incarnation: l.Incarnation, Sequence: uint64(l.All)},
	}
}

// LevelOf returns the level that was published as u. ok is false when u is not a
// level.
func LevelOf(u presence.Update) (l Level, ok bool) {
	l = Level{Incarnation: u.Version.Incarnation, All: int64(u.Version.Sequence)}
	// A level that was never published has no value: the page has not changed.
	if u.Kind != KindLevel || u.Value == "" {
		return l, u.Kind == KindLevel
	}

	by, at, _ := strings.Cut(u.Value, " ")
	n, err := strconv.ParseInt(by, 10, 64)
	sec, err2 := strconv.ParseInt(at, 10, 64)

	l.By = n
	l.At = presence.TimeOf(sec)

	return l, err == nil && err2 == nil
}

// Update returns the record of the user as it is published.
func (r Record) Update(user User) presence.Update {
	return presence.Update{
		Topic:   RecordTopic(user),
		Version: r.Version,
		Value:   strconv.FormatInt(presence.Seconds(r.Updated), 10),
	}
}

// UserOf returns the user whose record was published as u, or false when u is not a record.
func UserOf(u presence.Update) (User, bool) {
	if u.Kind != KindRecord {
		return User{}, false
	}

	user, err := ParseUser(u.Key)
	return user, err == nil
}
