package identity

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"headcount/presence"
)

// maxHops bounds how many entries of X-Forwarded-For are read. If there are more,
// the client's address is the last entry read, which is a trusted proxy.
const maxHops = 32

// Proxies is the set of trusted proxies. Only X-Forwarded-For and X-Forwarded-Proto from
// trusted proxies are used. It never changes, so any goroutine may use it.
type Proxies struct{ trusted []netip.Prefix }

// NewProxies parses CIDRs such as 10.0.0.0/8, and single addresses. Without any, no
// forwarding header is used.
func NewProxies(cidrs []string) (*Proxies, error) {
	p := &Proxies{}
	for _, s := range cidrs {
		s = strings.TrimSpace(s)
		if s == "" {
			continue
		}

		prefix, err := netip.ParsePrefix(s)
		if err != nil {
			addr, err := netip.ParseAddr(s)
			if err != nil || addr.Zone() != "" {
				return nil, fmt.Errorf("trusted-proxies: %q is not a network; write it like 10.0.0.0/8 or fd00::/8",
					presence.Excerpt(s))
			}
			// A single address is a network of one.
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}

		// Addresses are compared in their plain form, so networks must be too.
		if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
			prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
		}

		p.trusted = append(p.trusted, prefix.Masked())
	}

	return p, nil
}

// Addr returns the client's address. That is the peer's address or, if the peer is a trusted
// proxy, the nearest address in X-Forwarded-For that is not a trusted proxy. At an entry that
// is not an address, Addr returns the address read before it. The result is invalid if the
// peer has no address, as on a Unix socket.
func (p *Proxies) Addr(r *http.Request) netip.Addr {
	addr, _ := parseHop(r.RemoteAddr)
	lines := r.Header["X-Forwarded-For"]
	hops := 0

	// From the end, which the nearest proxy has written. What stands before may be made up.
	for i := len(lines) - 1; i >= 0; i-- {
		rest := lines[i]
		more := true
		for more {
			if hops >= maxHops || !p.trusts(addr) {
				return addr
			}

			var hop string
			rest, hop, more = cutLast(rest)
			hops++
			if hop == "" {
				continue // RFC 9110, 5.6.1.2: empty elements of a list are ignored
			}

			next, ok := parseHop(hop)
			if !ok {
				return addr
			}
			addr = next
		}
	}

	return addr
}

// cutLast cuts the last element of a comma-separated list off. more says whether there are elements before it.
func cutLast(list string) (rest, last string, more bool) {
	comma := strings.LastIndexByte(list, ',')
	if comma < 0 {
		return "", strings.TrimSpace(list), false
	}

	return list[:comma], strings.TrimSpace(list[comma+1:]), true
}

// Secure reports whether the client uses TLS to this server, or to a trusted proxy according
// to its X-Forwarded-Proto. The first of several values counts, because it is from the proxy
// nearest to the client. Some proxies send wss for a WebSocket.
func (p *Proxies) Secure(r *http.Request) bool {
	// Whatever the header says, which the client may have sent itself.
	if r.TLS != nil {
		return true
	}

	proto := r.Header.Get("X-Forwarded-Proto")
	if proto == "" {
		return false
	}

	proto, _, _ = strings.Cut(proto, ",")
	proto = strings.TrimSpace(proto)

	if !strings.EqualFold(proto, "https") && !strings.EqualFold(proto, "wss") {
		return false
	}

	// Anybody may send the header, so it counts from a trusted proxy alone.
	_, trusted := p.Peer(r)
	return trusted
}

// Peer returns the address that sent r to this server, and whether it is a trusted proxy.
func (p *Proxies) Peer(r *http.Request) (addr netip.Addr, trusted bool) {
	addr, _ = parseHop(r.RemoteAddr)

	return addr, p.trusts(addr)
}

func (p *Proxies) trusts(addr netip.Addr) bool {
	for _, prefix := range p.trusted {
		if prefix.Contains(addr) {
			return true
		}
	}

	return false
}

// parseHop reads an address with or without a port, IPv6 with or without
// brackets. An IPv4 address in IPv6 form becomes IPv4, and a zone is removed.
func parseHop(s string) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(s)
	if err == nil {
		return addr.Unmap().WithZone(""), true
	}

	n := len(s)
	if n > 2 && s[0] == '[' && s[n-1] == ']' {
		addr, err = netip.ParseAddr(s[1 : n-1])
	} else {
		var ap netip.AddrPort
		ap, err = netip.ParseAddrPort(s)
		addr = ap.Addr()
	}
	if err != nil {
		return netip.Addr{}, false
	}

	return addr.Unmap().WithZone(""), true
}
