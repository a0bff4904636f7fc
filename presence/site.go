package presence

import (
	"fmt"
	"strings"
)

// DefaultSiteName is the name of DefaultSite in settings.
const DefaultSiteName = "default"

const (
	MaxSiteName = 32  // bytes of the name of a site
	MaxSites    = 100 // of one server
)

// MaxName is the longest Name of a page, in bytes.
const MaxName = len(siteMark) + MaxSiteName + len(siteMark) + 4*MaxPageLength

// siteMark encloses the site in a qualified name. It sorts before every character that a page
// may begin with, so the names from firstOfDefault on are exactly those of the default site.
const (
	siteMark       = "\x1f"
	firstOfDefault = " "
)

// ParseSite returns the site with the given name.
func ParseSite(name string) (Site, error) {
	if name == "" || len(name) > MaxSiteName || !word(name) {
		return Site{}, fmt.Errorf("%q is no name of a site; it has 1 to %d lower case letters, digits and hyphens",
			Excerpt(name), MaxSiteName)
	}

	if name == DefaultSiteName {
		return DefaultSite, nil
	}

	return SiteOf(name), nil
}

// Name returns the name of the site in settings.
func (n Site) Name() string {
	if n == DefaultSite {
		return DefaultSiteName
	}

	return n.String()
}

// Qualify returns the qualified name of the key of a page, a user, a counter or a limit. All
// code behind the HTTP and WebSocket interfaces uses qualified names, so that equal keys of
// two sites are different. In the default site the name is the key itself. SplitName is the
// inverse.
func (n Site) Qualify(key string) string {
	if n == DefaultSite {
		return key
	}

	return siteMark + n.String() + siteMark + key
}

// SplitName returns the site and the key in a qualified name.
func SplitName(name string) (site Site, key string) {
	if name == "" || name[0] != siteMark[0] {
		return DefaultSite, name
	}

	word, key, ok := strings.Cut(name[len(siteMark):], siteMark)
	// Only Qualify writes the mark, and it writes two.
	if !ok {
		return DefaultSite, name
	}

	return SiteOf(word), key
}

// KeyOf returns the key in a qualified name, which is what clients see.
func KeyOf(name string) string {
	// Nearly all names are of the default site, and these are their own keys.
	if name == "" || name[0] != siteMark[0] {
		return name
	}

	_, key, ok := strings.Cut(name[len(siteMark):], siteMark)
	if !ok {
		return name
	}

	return key
}

// TotalOf returns the name of the total of the page's site, see AllPages.
func TotalOf(page string) string {
	site, _ := SplitName(page)
	return site.Qualify(AllPages)
}

// CheckName is CheckPage for the name of a page.
func CheckName(name string) error {
	site, key := SplitName(name)
	// The name may come from another process, or from a file.
	if len(site.String()) > MaxSiteName || !word(site.String()) {
		return fmt.Errorf("%w: %q is no name of a site", ErrPage, Excerpt(site.String()))
	}

	return CheckPage(key)
}

// FirstWith returns the lowest name, in byte order, of the site of prefix that begins with
// prefix. An empty prefix belongs to the default site.
func FirstWith(prefix string) string {
	if prefix == "" {
		return firstOfDefault
	}
	return prefix
}

// HasPrefix reports whether name begins with prefix and is in the same site.
func HasPrefix(name, prefix string) bool {
	return strings.HasPrefix(name, prefix) && name >= FirstWith(prefix)
}
