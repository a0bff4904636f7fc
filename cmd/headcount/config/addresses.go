package config

import (
	"net"
	"net/netip"
	"slices"
	"strings"

	"headcount/internal/setting"
	"headcount/presence"
)

func (c *Server) checkRoles() error {
	if len(c.Roles) == 0 {
		return setting.Errorf("roles", "no role is given; give one or more of %s", strings.Join(allRoles, ", "))
	}

	for _, role := range c.Roles {
		if !slices.Contains(allRoles, role) {
			return setting.Errorf("roles", "unknown role %q; the roles are %s", role, strings.Join(allRoles, ", "))
		}
	}

	// The embedded store is in the memory of this process, so no other one could do the missing role.
	for _, role := range allRoles {
		if c.Redis == "" && !c.HasRole(role) {
			return setting.Errorf("roles", "this process does not do %s, so it needs a store that it shares with "+
				"others; give --redis too, or all three roles", role)
		}
	}

	return nil
}

// Address is an address that a process listens on, with its flag.
type Address struct{ Flag, Addr string }

// Addresses returns the addresses that this process listens on.
func (c *Server) Addresses() []Address {
	// Those of roles that this process lacks are not opened, even though their flags have defaults.
	all := []Address{{"admin-listen", c.AdminListen}}
	if c.HasRole(presence.RoleGateway) {
		all = append(all, Address{"listen", c.Listen})
		if c.Redirect != "" {
			all = append(all, Address{"http-redirect", c.Redirect})
		}
	}

	if c.Redis != "" {
		all = append(all, Address{"cluster-listen", c.ClusterListen})
	}

	return all
}

func (c *Server) checkAddresses() error {
	for _, a := range []Address{
		{"admin-listen", c.AdminListen}, {"listen", c.Listen}, {"cluster-listen", c.ClusterListen},
		{"http-redirect", c.Redirect},
	} {
		// All of them, opened or not: a wrong one would otherwise surprise only when a role is added.
		if _, _, err := setting.SplitAddress(a.Addr); err != nil && a.Addr != "" {
			return setting.Errorf(a.Flag, "%q is not an address: %v; write host:port, such as 127.0.0.1:8080 or "+
				":8080", a.Addr, err)
		}
	}

	if err := c.checkAdvertised(); err != nil {
		return err
	}

	// Without Redis nobody dials this process, and the default of --cluster-listen is never opened.
	if c.Redis != "" && setting.IsWildcard(c.AdvertiseAddr()) {
		return setting.Errorf("advertise", "other processes cannot dial the wildcard %q; give the host:port at "+
			"which they reach this one", c.AdvertiseAddr())
	}

	opened := c.Addresses()
	for i, a := range opened {
		for _, b := range opened[:i] {
			if overlap(a.Addr, b.Addr) {
				return setting.Errorf(a.Flag, "%q leaves no room for --%s, which is %q; give each its own port", a.Addr,
					b.Flag, b.Addr)
			}
		}
	}

	return nil
}

// overlap reports whether two addresses cannot be open at a time.
func overlap(a, b string) bool {
	hostA, portA, _ := setting.SplitAddress(a)
	hostB, portB, _ := setting.SplitAddress(b)
	// The system chooses another port for each :0.
	if portA != portB || portA == 0 {
		return false
	}

	// A wildcard has the port of every address of the machine.
	return listenedHost(hostA) == listenedHost(hostB) || setting.IsWildcard(a) || setting.IsWildcard(b)
}

// listenedHost returns the address that a listener on the host gets.
func listenedHost(host string) string {
	// Go listens on the first IPv4 address of a name.
	if host == "localhost" {
		return "127.0.0.1"
	}

	return host
}

// checkAdvertised checks --advertise.
func (c *Server) checkAdvertised() error {
	if c.Advertise == "" {
		return nil
	}

	// $(POD_IP):7946, as manifests write it, has no brackets around an IPv6 address.
	if last := strings.LastIndex(c.Advertise, ":"); last > 0 {
		ip, err := netip.ParseAddr(c.Advertise[:last])
		if err == nil && ip.Is6() {
			c.Advertise = net.JoinHostPort(c.Advertise[:last], c.Advertise[last+1:])
		}
	}

	_, port, err := setting.SplitAddress(c.Advertise)
	if err != nil {
		return setting.Errorf("advertise", "%q is not an address: %v; write the host:port at which other processes "+
			"reach this one", c.Advertise, err)
	}
	if port == 0 {
		return setting.Errorf("advertise", "nobody can reach port 0; write the port at which other processes reach "+
			"--cluster-listen")
	}

	return nil
}
