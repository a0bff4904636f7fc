package presence_test

import (
	"testing"

	"headcount/presence"
)

func TestTopicsAreNoPages(t *testing.T) {
	user := [presence.FollowerSize]byte{1, 2, 255}
	changes, follows := presence.ChangesTopic("p"), presence.FollowsTopic(user)
	for _, topic := range []string{changes, follows} {
		if err := presence.CheckPage(topic); err == nil {
			t.Errorf("%q could be a page", topic)
		}
		if err := presence.CheckTopic(topic); err != nil {
			t.Errorf("%q: %v", topic, err)
		}
		if presence.IsPage(topic) {
			t.Errorf("%q is taken for a page", topic)
		}
	}
	if page, ok := presence.PageOfChanges(changes); page != "p" || !ok {
		t.Errorf("%q is about %q, %v", changes, page, ok)
	}
	if got, ok := presence.UserOfFollows(follows); got != user || !ok {
		t.Errorf("%q is about %x, %v", follows, got, ok)
	}
	if _, ok := presence.PageOfChanges(follows); ok {
		t.Errorf("%q is taken for the changes of a page", follows)
	}
	if !presence.IsPage("p") || !presence.IsPage(presence.Site) {
		t.Error("a page is no page")
	}
}

func TestBadTopics(t *testing.T) {
	follows := presence.FollowsTopic([presence.FollowerSize]byte{})
	for _, topic := range []string{
		"", "-", presence.ChangesTopic(""), presence.ChangesTopic(presence.Site), presence.ChangesTopic(follows),
		presence.ChangesTopic(presence.ChangesTopic("p")), follows[:len(follows)-1], follows + "A", follows[:len(follows)-1] + "*", follows[:len(follows)-1] + "B",
	} {
		if err := presence.CheckTopic(topic); err == nil {
			t.Errorf("%q passes", topic)
		}
	}
}

func TestChangesAreInThePagesBucket(t *testing.T) {
	for _, page := range []string{"p", "another page", "ページ"} {
		if a, b := presence.Bucket(page, 64), presence.Bucket(presence.ChangesTopic(page), 64); a != b {
			t.Errorf("%q is in %d, its changes in %d", page, a, b)
		}
	}
}
