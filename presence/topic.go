package presence

import (
	"encoding/base64"
	"fmt"
	"strings"
)

// A topic is what counts are published under: a page, or one of two kinds of
// numbers that travel the same way. Their marks are private-use characters,
// which no page has.
//
//	U+E000 page   how far the changes of the page have come
//	U+E001 user   how often the follows of a user have changed
const (
	changesMark = "\uE000"
	followsMark = "\uE001"
)

// FollowerSize is the length of a user in a topic of follows, in bytes.
const FollowerSize = 16

// ChangesTopic is the topic of a page's changes.
func ChangesTopic(page string) string { return changesMark + page }

// FollowsTopic is the topic of a user's follows.
func FollowsTopic(user [FollowerSize]byte) string {
	return followsMark + base64.RawURLEncoding.EncodeToString(user[:])
}

// PageOfChanges is the page whose changes the topic is about.
func PageOfChanges(topic string) (page string, ok bool) {
	return strings.CutPrefix(topic, changesMark)
}

// UserOfFollows is the user whose follows the topic is about.
func UserOfFollows(topic string) (user [FollowerSize]byte, ok bool) {
	text, ok := strings.CutPrefix(topic, followsMark)
	if !ok || len(text) != base64.RawURLEncoding.EncodedLen(FollowerSize) {
		return user, false
	}
	n, err := base64.RawURLEncoding.Strict().Decode(user[:], []byte(text))
	return user, err == nil && n == FollowerSize
}

// IsPage reports whether the topic is that of a page's count of users.
func IsPage(topic string) bool {
	return !strings.HasPrefix(topic, changesMark) && !strings.HasPrefix(topic, followsMark)
}

// CheckTopic says why nothing can be published under topic, or nil.
func CheckTopic(topic string) error {
	if page, ok := PageOfChanges(topic); ok {
		return CheckPage(page)
	}
	if IsPage(topic) {
		return CheckReadable(topic)
	}
	if _, ok := UserOfFollows(topic); !ok {
		return fmt.Errorf("%w: a topic of follows that names no user", ErrPage)
	}
	return nil
}
