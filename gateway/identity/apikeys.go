package identity

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"headcount/presence"
)

// SiteKeys are the API keys of servers. Each key is valid for all sites or for one.
type SiteKeys []siteKey

// siteKey is hashed, so comparing it takes the same time for every presented key.
type siteKey struct {
	hash [sha256.Size]byte
	all  bool          // valid for all sites
	site presence.Site // otherwise the site for which it is valid
}

// NewSiteKeys parses keys. A key with the name of a site and a colon before it is valid for that
// site only. White space around a key is not part of it: no header could have it.
func NewSiteKeys(written []string, sites *Sites) (SiteKeys, error) {
	var keys SiteKeys
	for _, text := range written {
		site, key := sites.SplitKey(text)
		// Files and variables often end with a newline.
		key = strings.TrimSpace(key)

		if key == "" && text != "" && site == nil {
			return nil, errors.New("api-key: a key is only white space; give a long random value")
		}
		// As of a file with a key on each line: nobody could ever send it.
		if strings.ContainsFunc(key, unicode.IsControl) {
			return nil, errors.New("api-key: a key has a line break or another control character, which no header " +
				"can have; give several keys one by one")
		}

		// An empty text gives a key that Sites never accepts.
		one := siteKey{hash: sha256.Sum256([]byte(key)), all: site == nil}
		if site != nil {
			if key == "" {
				return nil, fmt.Errorf("api-key: the key of the site %q is empty; write %s:KEY",
					site.Name(), site.Name())
			}
			one.site = site.Site
		}

		keys = append(keys, one)
	}
	return keys, nil
}

// SplitKey returns the site for which a key is valid, or nil for all sites, and the key itself.
func (s *Sites) SplitKey(written string) (of *Site, key string) {
	name, key, ok := strings.Cut(written, ":")
	// A key may have a colon of its own, so only the name of a site counts.
	for i := range s.list {
		if ok && s.list[i].Name() == name {
			return &s.list[i], key
		}
	}
	return nil, written
}

// Has reports whether key is one of k.
func (k SiteKeys) Has(key string) bool {
	all, sites := k.Sites(key)

	return all || len(sites) > 0
}

// Holds reports whether key is one of k and valid for the site.
func (k SiteKeys) Holds(key string, site presence.Site) bool {
	all, sites := k.Sites(key)

	return all || slices.Contains(sites, site)
}

// Sites returns the sites for which a key is valid: all of them, or a list.
func (k SiteKeys) Sites(key string) (all bool, sites []presence.Site) {
	// As in almost every request: a hash would be a twentieth of a connection's cost.
	if key == "" {
		return false, nil
	}

	sum := sha256.Sum256([]byte(key))

	// All are compared, so that the time does not tell which one fits.
	for _, one := range k {
		switch {
		case subtle.ConstantTimeCompare(one.hash[:], sum[:]) == 0:
		case one.all:
			all = true
		default:
			sites = append(sites, one.site)
		}
	}
	return all, sites
}
