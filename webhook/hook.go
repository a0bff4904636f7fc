package webhook

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
	"headcount/internal/setting"
	"headcount/presence"
)

// condition is the kind of changes that a hook reports.
type condition uint8

const (
	occupation  condition = iota // a page becomes occupied or vacated
	threshold                    // the count of a page passes a threshold
	peak                         // a page has its greatest count of the day
	everyCount                   // the count of a page changes
	overCounter                  // a counter passes a threshold
	attendance                   // a user comes or goes
)

// Hook is one webhook. It does not change.
type Hook struct {
	ID        string // of its state and outbox: a hash, which does not reveal the URL
	URL       string
	Host      string // of the URL, for logs and metrics
	Number    int    // its place among all webhooks, from 1: several may have one host
	condition condition
	match     string         // a pattern of keys; empty: the total of a site
	limit     int64          // the threshold
	every     time.Duration  // of everyCount: the least time between two events of a page
	site      *presence.Site // nil: all sites
	bucket    int            // the owner of this bucket sends the events
}

// matches reports whether the hook covers the page, counter or user with this name.
func (h *Hook) matches(name string) bool {
	site, key := presence.SplitName(name)
	if h.site != nil && *h.site != site {
		return false
	}

	// A pattern never matches the total of a site, and no counter has one.
	isTotal := key == presence.AllPages && h.condition != overCounter
	if h.match == "" || isTotal {
		return h.match == "" && key == presence.AllPages
	}

	return counter.Matches(h.match, key)
}

// usage describes the form of a webhook.
const usage = `write page:PATTERN=URL, page:PATTERN>100=URL, page:PATTERN>peak=URL, count:PATTERN@5s=URL, ` +
	`counter:PATTERN>100=URL, user:PATTERN=URL, or site in place of page:PATTERN for a whole site`

// Bounds of the time between two events of everyCount.
const (
	minEvery = time.Second
	maxEvery = 24 * time.Hour
)

// Parse parses webhooks in the form of --webhook: the condition, an equals sign, and the URL. sites are
// the sites of the server. An error is one line and has no URL, because a URL may hold a secret.
func Parse(texts []string, sites []presence.Site) ([]*Hook, error) {
	if len(texts) > MaxHooks {
		return nil, fmt.Errorf("there are more than %d; a pattern with * covers many pages", MaxHooks)
	}

	var hooks []*Hook
	for i, text := range texts {
		hook, err := parse(text, sites)
		if err != nil {
			return nil, fmt.Errorf("number %d: %w", i+1, err)
		}
		// Two equal hooks would share an outbox, and the receiver would get each event once.
		if slices.ContainsFunc(hooks, func(o *Hook) bool { return o.ID == hook.ID }) {
			return nil, fmt.Errorf("number %d is a duplicate; remove it", i+1)
		}

		hook.Number = i + 1
		hooks = append(hooks, hook)
	}

	return hooks, nil
}

func parse(text string, sites []presence.Site) (*Hook, error) {
	// A page may have an equals sign, so the separator is found by what follows it.
	at := strings.Index(text, "=http")
	if at < 0 {
		return nil, fmt.Errorf("it has no http or https URL after an equals sign; %s", usage)
	}

	subject, link := text[:at], text[at+1:]
	u, err := url.Parse(link)
	if err != nil || !setting.IsWebURL(link) {
		return nil, fmt.Errorf("what follows %q= is no http or https URL; %s", subject, usage)
	}

	// Cut the limit off first: it is the last part, while a pattern may contain anything.
	subject, limit := cutLimit(subject)
	kind, pattern, colon := strings.Cut(subject, ":")
	kind, site, sited := strings.Cut(kind, "@")

	h := &Hook{URL: link, Host: u.Host}
	if sited {
		h.site, err = siteOf(site, sites)
		if err != nil {
			return nil, err
		}
	}

	isSite := kind == "site" && !colon
	isPattern := hasPattern[kind] && colon
	if !isSite && !isPattern {
		return nil, fmt.Errorf("%q is not a valid condition; %s", presence.Excerpt(subject), usage)
	}
	if kind == "count" {
		pattern, h.every, err = cutEvery(pattern)
		if err != nil {
			return nil, err
		}
	}
	if isPattern {
		if err := counter.CheckMatch(pattern); err != nil {
			return nil, fmt.Errorf("%q: %w", presence.Excerpt(subject), err)
		}
		h.match = pattern
	}

	if err := h.setCondition(kind, limit, presence.Excerpt(subject)); err != nil {
		return nil, err
	}

	// The hash is that of the whole setting, so a hook begins anew with another condition or URL.
	sum := sha256.Sum256([]byte(text))
	h.ID = hex.EncodeToString(sum[:8])
	h.bucket = presence.Bucket(h.ID, presence.DefaultBuckets)

	return h, nil
}

// hasPattern are the kinds of conditions that have a pattern of names.
var hasPattern = map[string]bool{"page": true, "count": true, "counter": true, "user": true}

// cutEvery cuts the time between two events off a pattern, which may have an @ of its own.
func cutEvery(text string) (pattern string, every time.Duration, err error) {
	at := strings.LastIndexByte(text, '@')
	if at < 0 {
		return "", 0, fmt.Errorf("%q has no time between two events of a page; write count:PATTERN@5s=URL",
			presence.Excerpt(text))
	}

	every, err = time.ParseDuration(text[at+1:])
	if err != nil || every < minEvery || every > maxEvery {
		return "", 0, fmt.Errorf("%q is no time from 1s to 24h; write count:PATTERN@5s=URL",
			presence.Excerpt(text[at+1:]))
	}

	return text[:at], every, nil
}

// cutLimit cuts "peak" or a threshold off a condition. Without one it returns "".
func cutLimit(text string) (subject, limit string) {
	at := strings.LastIndexByte(text, '>')
	if at < 0 || !isLimit(text[at+1:]) {
		return text, ""
	}

	return text[:at], text[at+1:]
}

// siteOf returns the site of the server with a name.
func siteOf(name string, sites []presence.Site) (*presence.Site, error) {
	site, err := presence.ParseSite(name)
	if err != nil {
		return nil, err
	}
	// A site that does not exist would never have an event, and nobody would notice.
	if !slices.Contains(sites, site) {
		return nil, fmt.Errorf("there is no site %q; name one of --site, or leave @%s out for all sites", name, name)
	}

	return &site, nil
}

// setCondition sets the condition and its limit: "peak", a whole number, or "" where none was given.
func (h *Hook) setCondition(kind, limit, subject string) error {
	isNumber := limit != "" && limit != "peak"
	switch kind {
	case "counter":
		h.condition = overCounter
		if !isNumber {
			return fmt.Errorf("%q has no threshold, which a counter needs; write counter:PATTERN>100=URL", subject)
		}
	case "user":
		h.condition = attendance
		if limit != "" {
			return fmt.Errorf("%q has a threshold, which a user cannot have; write user:PATTERN=URL", subject)
		}
	case "count":
		h.condition = everyCount
		if limit != "" {
			return fmt.Errorf("%q has a threshold, which every count passes; write page:PATTERN>100=URL", subject)
		}
	default:
		h.condition = pageCondition(limit)
	}
	if !isNumber {
		return nil
	}

	n, err := strconv.ParseInt(limit, 10, 64)
	if err != nil || n < 1 {
		return fmt.Errorf("%q is no threshold; write a whole number from 1", presence.Excerpt(limit))
	}
	h.limit = n

	return nil
}

// pageCondition returns the condition of a page with that limit.
func pageCondition(limit string) condition {
	switch limit {
	case "":
		return occupation
	case "peak":
		return peak
	default:
		return threshold
	}
}

// isLimit reports whether the text after a > is a threshold. A page may have a > in its name.
func isLimit(s string) bool {
	return s == "peak" || s != "" && strings.Trim(s, "0123456789") == ""
}

// ParseSecret parses a key in the form of Standard Webhooks.
func ParseSecret(text string) ([]byte, error) {
	encoded, ok := strings.CutPrefix(text, "whsec_")
	key, err := base64.StdEncoding.DecodeString(encoded)
	// Standard Webhooks demands these lengths.
	if !ok || err != nil || len(key) < 24 || len(key) > 64 {
		return nil, errors.New("it is not whsec_ and 24 to 64 bytes as base64; " +
			"make one by: echo whsec_$(openssl rand -base64 32)")
	}

	return key, nil
}
