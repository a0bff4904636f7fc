package link

import "time"

// Clock returns the time of the cluster, which is the same in all its processes, or the zero time while it is unknown.
type Clock func() time.Time

// toCluster converts a time of this process to one of the cluster. The zero time, which means unknown, stays zero.
func (c Clock) toCluster(moment time.Time) time.Time {
	now := c()
	if moment.IsZero() || now.IsZero() {
		return time.Time{}
	}

	return now.Add(time.Until(moment))
}

// toLocal converts a time of the cluster to one of this process, so that timers do not depend on other clocks.
func (c Clock) toLocal(moment time.Time) time.Time {
	now := c()
	if moment.IsZero() || now.IsZero() {
		return time.Time{}
	}

	return time.Now().Add(moment.Sub(now))
}
