// Package setting refuses settings that cannot work. Each package checks its own
// settings and returns an *Error; the program adds where the value came from. Every
// function may be called from any goroutine.
package setting

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// Error is a setting that cannot work. It never contains the value of a secret or of
// a URL, since a URL may contain a password.
type Error struct {
	Name    string // the flag's name without dashes, such as leave-grace
	Problem string // the problem and, after a semicolon, a remedy
}

func (e *Error) Error() string { return "--" + e.Name + ": " + e.Problem }

// Errorf returns an *Error for the named setting.
func Errorf(name, format string, args ...any) error {
	return &Error{name, fmt.Sprintf(format, args...)}
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?$`)

// SplitAddress splits host:port. An empty host is a wildcard.
func SplitAddress(address string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(address)
	if err != nil {
		// Without the address, which the caller's error already quotes.
		if ae := (*net.AddrError)(nil); errors.As(err, &ae) {
			err = errors.New(ae.Err)
		}
		return "", 0, err
	}

	if _, err := netip.ParseAddr(host); err != nil && host != "" && !hostName.MatchString(host) {
		return "", 0, errors.New("the host is neither a name nor an IP address")
	}

	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, errors.New("the port is not a number from 0 to 65535")
	}

	return host, int(n), nil
}

// HostName returns the full name of a host as its certificate has it: in lower case, an international name in its xn--
// form, and without a dot at its end. It reports whether the text is such a name, and no address.
func HostName(text string) (name string, ok bool) {
	name, err := idna.Lookup.ToASCII(strings.TrimSuffix(text, "."))
	_, notAddress := netip.ParseAddr(name)
	labels := strings.Split(name, ".")
	isFull := len(labels) > 1 && !slices.Contains(labels, "")

	return name, err == nil && notAddress != nil && isFull
}

// IsWebURL reports whether text is an http or https URL with a host.
func IsWebURL(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != ""
}

// Cause returns the cause of an HTTP client's error, without the URL, which may contain a secret.
func Cause(err error) error {
	if u := (*url.Error)(nil); errors.As(err, &u) {
		return u.Err
	}
	return err
}

// IsWildcard reports whether a listener on the address accepts connections to every address of the machine.
func IsWildcard(address string) bool {
	host, _, _ := SplitAddress(address)
	// [::] and 0.0.0.0 both listen everywhere.
	ip, err := netip.ParseAddr(host)
	return host == "" || err == nil && ip.IsUnspecified()
}

// IsLoopback reports whether only processes of the same machine reach the address.
func IsLoopback(address string) bool {
	host, _, _ := SplitAddress(address)
	ip, err := netip.ParseAddr(host)
	// An IPv4 address may come in the form of IPv6.
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}

// WithoutMark returns the text of a file without the byte order mark that some editors put in front of it.
func WithoutMark(data []byte) []byte { return bytes.TrimPrefix(data, []byte("\ufeff")) }
