package dashboard

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// shown are the metrics that a report carries, of all that there are.
var shown = map[string]bool{
	"headcount_connections":           true,
	"headcount_pages_watched":         true,
	"headcount_deliveries_total":      true,
	"headcount_client_messages_total": true,
	"headcount_users":                 true,
	"headcount_partitions_owned":      true,
	"headcount_store_changes_total":   true,
	"process_resident_memory_bytes":   true,
	"process_cpu_seconds_total":       true,
	lagMetric:                         true,
	heardMetric:                       true,
	outMetric:                         true,
}

// Load reads the metrics that are shown. Those with one label, of which there
// are only those about peers, are named name{value}. What cannot be read is
// left out.
func Load(from prometheus.Gatherer) (map[string]float64, error) {
	families, err := from.Gather() // what it could read it returns all the same
	load := map[string]float64{}
	for _, f := range families {
		if !shown[f.GetName()] {
			continue
		}
		for _, m := range f.GetMetric() {
			name := f.GetName()
			if labels := m.GetLabel(); len(labels) == 1 {
				name += "{" + labels[0].GetValue() + "}"
			} else if len(labels) > 1 {
				continue
			}
			switch f.GetType() {
			case dto.MetricType_GAUGE:
				load[name] = m.GetGauge().GetValue()
			case dto.MetricType_COUNTER:
				load[name] = m.GetCounter().GetValue()
			default:
				err = errors.Join(err, errors.New("dashboard: "+name+" is no number"))
			}
		}
	}
	return load, err
}
