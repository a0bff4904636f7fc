package link

import "time"

// Clock returns the time of the cluster, on which all its processes agree, or the zero time while it is not known.
type Clock func() time.Time

// toCluster returns a moment of this process as one of the cluster. Zero stays zero: nobody knows.
func (c Clock) toCluster(moment time.Time) time.Time {
	now := c()
	if moment.IsZero() || now.IsZero() {
		return time.Time{}
	}

	return now.Add(time.Until(moment))
}

// toLocal returns a moment of the cluster as one of this process, in whose timers no other clock has a part.
func (c Clock) toLocal(moment time.Time) time.Time {
	now := c()
	if moment.IsZero() || now.IsZero() {
		return time.Time{}
	}

	return time.Now().Add(moment.Sub(now))
}
