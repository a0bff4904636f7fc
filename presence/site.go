package presence

import (
	"fmt"
	"strings"
)

// DefaultSiteName is what people call DefaultSite.
const DefaultSiteName = "default"

const (
	MaxSiteName = 32  // bytes of the name of a site
	MaxSites    = 100 // of one server
)

// MaxName is the longest Name of a page, in bytes.
const MaxName = len(siteMark) + MaxSiteName + len(siteMark) + 4*MaxPageLength

// siteMark stands around the site in a Name. It sorts before everything that a page may begin
// with, so the names of the default site are all that sort from firstOfDefault on.
const (
	siteMark       = "\x1f"
	firstOfDefault = " "
)

// ParseSite returns the site that people call name.
func ParseSite(name string) (Site, error) {
	if name == "" || len(name) > MaxSiteName || !word(name) {
		return Site{}, fmt.Errorf("%q is no name of a site; it has 1 to %d lower case letters, digits and hyphens", Excerpt(name), MaxSiteName)
	}
	if name == DefaultSiteName {
		return DefaultSite, nil
	}
	return SiteOf(name), nil
}

// Name is what people call the site.
func (n Site) Name() string {
	if n == DefaultSite {
		return DefaultSiteName
	}
	return n.String()
}

// Qualify is what everything behind the gateway's edge calls the site's key, which is that of
// a page, a user, a counter or a limit. So what has the same key on two sites has nothing to
// do with each other. In the default site the name is the key itself. SplitName is the
// inverse.
func (n Site) Qualify(key string) string {
	if n == DefaultSite {
		return key
	}
	return siteMark + n.String() + siteMark + key
}

// SplitName returns the site and the key that a name was made of.
func SplitName(name string) (site Site, key string) {
	if name == "" || name[0] != siteMark[0] {
		return DefaultSite, name
	}
	word, key, ok := strings.Cut(name[len(siteMark):], siteMark)
	if !ok {
		return DefaultSite, name
	}
	return SiteOf(word), key
}

// KeyOf returns the key that a name was made of: what clients see.
func KeyOf(name string) string {
	if name == "" || name[0] != siteMark[0] {
		return name
	}
	_, key, ok := strings.Cut(name[len(siteMark):], siteMark)
	if !ok {
		return name
	}
	return key
}

// TotalOf returns the name under which the site of a page counts all its users.
func TotalOf(page string) string {
	site, _ := SplitName(page)
	return site.Qualify(AllPages)
}

// CheckName is CheckPage for the name of a page.
func CheckName(name string) error {
	site, key := SplitName(name)
	if len(site.String()) > MaxSiteName || !word(site.String()) {
		return fmt.Errorf("%w: %q is no name of a site", ErrPage, Excerpt(site.String()))
	}
	return CheckPage(key)
}

// FirstWith returns where the names of one site that begin with prefix begin in the order of
// bytes. A prefix that is empty is one of the default site.
func FirstWith(prefix string) string {
	if prefix == "" {
		return firstOfDefault
	}
	return prefix
}

// HasPrefix reports whether name begins with prefix and is of its site.
func HasPrefix(name, prefix string) bool {
	return strings.HasPrefix(name, prefix) && name >= FirstWith(prefix)
}
