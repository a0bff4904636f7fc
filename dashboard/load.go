package dashboard

import "headcount/presence"

// load has a process's statistics in the form that the dashboard page reads. The statistics
// of a role that the process does not have are left out, and so is memory if the system does
// not report it.
type load struct {
	*gatewayLoad
	*nodeLoad
	Memory int64   `json:"process_resident_memory_bytes,omitempty"`
	CPU    float64 `json:"process_cpu_seconds_total"`
}

type gatewayLoad struct {
	Connections int64 `json:"headcount_connections"`
	Watched     int64 `json:"headcount_pages_watched"`
	Deliveries  int64 `json:"headcount_deliveries_total"`
	Messages    int64 `json:"headcount_client_messages_total"`
}

type nodeLoad struct {
	Users      int64 `json:"headcount_users"`
	Partitions int64 `json:"headcount_partitions_owned"`
	Changes    int64 `json:"headcount_store_changes_total"`
}

// loadOf returns the load in a report, or nil for a process that did not answer.
func loadOf(r *presence.Report) *load {
	if r == nil {
		return nil
	}

	// A nil pointer leaves the members out of the JSON, as the page expects of a role that is missing.
	return &load{
		gatewayLoad: (*gatewayLoad)(r.Gateway),
		nodeLoad:    (*nodeLoad)(r.Node),
		Memory:      r.Process.Memory,
		CPU:         r.Process.CPU,
	}
}
