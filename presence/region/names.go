package region

import (
	"regexp"
	"strings"

	"headcount/internal/setting"
)

var validName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

const nameRule = "1 to 64 letters, digits, _ and -"

// SplitPeer takes a peer's setting, name=redis-url, apart.
func SplitPeer(peer string) (name, url string) {
	name, url, _ = strings.Cut(peer, "=")
	return name, url
}

// CheckNames refuses an invalid name of a region, and peers (each written
// name=redis-url) that have this region's name or the name of another peer. The
// error is a *setting.Error. Its text never has a URL.
func CheckNames(own string, peers []string) error {
	if !validName.MatchString(own) {
		return setting.Errorf("region", "%q is not a valid name of a region; use %s", own, nameRule)
	}

	seen := map[string]bool{}

	for _, peer := range peers {
		name, _ := SplitPeer(peer)
		named := strings.Contains(peer, "=") && validName.MatchString(name)

		switch {
		case !named: // the text leaves it out, because it may be a URL with a password
			return setting.Errorf("peer",
				"a peer does not begin with the name of a region; write name=redis-url, with a name of %s", nameRule)
		case name == own:
			return setting.Errorf("peer",
				"%q is the name of this region; name another region, or change --region", name)
		case seen[name]:
			return setting.Errorf("peer", "%q is given twice; give each region once", name)
		}
		seen[name] = true
	}

	return nil
}
