package deploy_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
)

// The output of the chart, and the files for Docker and the monitoring, are checked against the parts of their schemas
// that they use. A field that is missing here counts as a mistake, and a field without fields may have any value. The
// required values are checked below.
const (
	object = "apiVersion, kind, metadata: {name, labels, annotations}"
	probe  = "{httpGet: {path, port}, periodSeconds, timeoutSeconds, failureThreshold}"
	labels = "{matchLabels}"
)

var schemas = map[string]string{
	"apps/v1 Deployment": "{" + object + ", spec: {replicas, selector: " + labels +
		", strategy: {type, rollingUpdate: {maxUnavailable, maxSurge}}, " +
		"template: {metadata: {labels, annotations}, spec: {automountServiceAccountToken, enableServiceLinks, " +
		"imagePullSecrets: {name}, " +
		"nodeSelector, tolerations, affinity, priorityClassName, serviceAccountName, terminationGracePeriodSeconds, " +
		"securityContext: {runAsNonRoot, runAsUser, runAsGroup, fsGroup, seccompProfile: {type}}, " +
		"topologySpreadConstraints: {maxSkew, topologyKey, whenUnsatisfiable, labelSelector: " + labels + "}, " +
		"volumes: {name, configMap: {name}, secret: {secretName}, persistentVolumeClaim: {claimName}}, " +
		"containers: {name, image, args, volumeMounts: {name, mountPath, readOnly}, envFrom: {secretRef: {name}}, " +
		"env: {name, value, valueFrom: {fieldRef: {fieldPath}}}, ports: {name, containerPort, protocol}, " +
		"startupProbe: " + probe + ", livenessProbe: " + probe + ", readinessProbe: " + probe + ", " +
		"lifecycle: {preStop: {sleep: {seconds}}}, resources: {requests, limits}, " +
		"securityContext: {allowPrivilegeEscalation, readOnlyRootFilesystem, capabilities: {drop}}}}}}}",
	"policy/v1 PodDisruptionBudget": "{" + object + ", spec: {maxUnavailable, selector: " + labels + "}}",
	"v1 Service": "{" + object +
		", spec: {type, clusterIP, selector, ports: {name, port, targetPort}}}",
	"v1 ServiceAccount": "{" + object + ", automountServiceAccountToken}",
	"batch/v1 Job":      "{" + object + ", spec: {backoffLimit, template}}",
	"v1 PersistentVolumeClaim": "{" + object +
		", spec: {accessModes, storageClassName, resources: {requests: {storage}}}}",
	"v1 ConfigMap": "{" + object + ", data}",
	"autoscaling/v2 HorizontalPodAutoscaler": "{" + object +
		", spec: {scaleTargetRef: {apiVersion, kind, name}, minReplicas, maxReplicas, " +
		"metrics: {type, pods: {metric: {name}, target: {type, averageValue}}}, " +
		"behavior: {scaleDown: {stabilizationWindowSeconds, policies: {type, value, periodSeconds}}}}}",
	"networking.k8s.io/v1 NetworkPolicy": "{" + object + ", spec: {podSelector: " + labels + ", policyTypes, " +
		"ingress: {from: {podSelector: " + labels + ", namespaceSelector: " + labels + "}, ports: {port, protocol}}}}",
	"monitoring.coreos.com/v1 ServiceMonitor": "{" + object + ", spec: {selector: " + labels +
		", endpoints: {port, interval}}}",
	"monitoring.coreos.com/v1 PrometheusRule": "{" + object + ", spec: {groups: {name, interval, " +
		"rules: {alert, expr, for, labels, annotations}}}}",
	"a service of compose.yaml": "{image, build, restart, hostname, command, ports, volumes, networks, depends_on, " +
		"environment, " +
		"healthcheck: {test, interval, timeout, start_period, retries}, stop_grace_period, read_only, cap_drop, " +
		"security_opt, ulimits}",
	"prometheus.yaml": "{global: {scrape_interval}, rule_files, scrape_configs: {job_name, static_configs: " +
		"{targets}}}",
	"grafana/datasource.yaml": "{apiVersion, datasources: {name, type, uid, url, isDefault}}",
	"grafana/dashboards.yaml": "{apiVersion, providers: {name, type, options: {path}}}",
}

func parsed(t *testing.T, text []byte) (value any) {
	t.Helper()
	if err := yaml.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}

	return value
}

// strict reports the fields of a value that its schema lacks.
func strict(t *testing.T, schema string, value any) {
	t.Helper()
	var look func(in string, fields, value any)
	look = func(in string, fields, value any) {
		if list, ok := value.([]any); ok && fields != nil {
			for _, value := range list {
				look(in, fields, value)
			}
			return
		}

		known, _ := fields.(map[string]any)
		is, ok := value.(map[string]any)
		if known != nil && !ok {
			t.Errorf("%s is %v and has no fields", in, value)
		}

		for name, value := range is {
			if _, ok := known[name]; ok {
				look(in+" "+name, known[name], value)
			} else if known != nil {
				t.Errorf("%s has no field %s", in, name)
			}
		}
	}

	// The schemas are YAML themselves.
	look(schema, parsed(t, []byte(schemas[schema])), value)
}

// at follows a path of field names and element numbers, separated by spaces, into a value.
func at(value any, path string) any {
	for step := range strings.FieldsSeq(path) {
		if list, ok := value.([]any); ok {
			value = nil
			if i, err := strconv.Atoi(step); err == nil && i < len(list) {
				value = list[i]
			}
			continue
		}

		fields, _ := value.(map[string]any)
		value = fields[step]
	}
	return value
}

// says returns the text of what at finds.
func says(value any, path string) string { return fmt.Sprint(at(value, path)) }

// must checks the texts of fields, by path.
func must(t *testing.T, name string, value any, wants map[string]string) {
	t.Helper()
	for path, want := range wants {
		if got := says(value, path); got != want {
			t.Errorf("%s: %s is %s, want %s", name, path, got, want)
		}
	}
}

// names returns the elements of a list, or the keys of a map.
func names(value any) (all []string) {
	if fields, ok := value.(map[string]any); ok {
		return slices.Sorted(maps.Keys(fields))
	}

	list, _ := value.([]any)
	for _, name := range list {
		all = append(all, fmt.Sprint(name))
	}

	return all
}

func file(t *testing.T, name string) []byte {
	t.Helper()

	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}

	return text
}

func TestCompose(t *testing.T) {
	whole := parsed(t, file(t, "compose.yaml"))
	there := func(name, kind string, all ...string) {
		t.Helper()
		for _, one := range all {
			if is, _ := at(whole, kind).(map[string]any); !slices.Contains(names(is), one) {
				t.Errorf("%s: there is no %s in %s", name, one, kind)
			}
		}
	}

	there("compose.yaml", "services", "proxy", "gateway-1", "gateway-2", "presence-1", "presence-2", "presence-3",
		"dispatcher-1", "dispatcher-2", "redis", "postgres", "prometheus", "grafana")

	for _, name := range names(at(whole, "services")) {
		s := at(whole, "services "+name)
		strict(t, "a service of compose.yaml", s)
		if at(s, "image") == nil {
			t.Errorf("%s has no image", name)
		}

		// A mounted file must exist, and a named volume must be declared.
		for _, v := range names(at(s, "volumes")) {
			from, _, _ := strings.Cut(v, ":")
			if !strings.HasPrefix(from, "./") {
				there(name, "volumes", from)
			} else if _, err := os.Stat(from); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		there(name, "services", names(at(s, "depends_on"))...)
		there(name, "networks", names(at(s, "networks"))...)

		if says(s, "image") == "headcount" {
			must(t, name, s, map[string]string{
				"read_only": "true", "cap_drop": "[ALL]", "environment HEADCOUNT_ADVERTISE": name + ":7946",
			})
			if !strings.Contains(string(file(t, "prometheus.yaml")), name+":8081") {
				t.Errorf("Prometheus does not know %s", name)
			}
		}
	}

	must(t, "compose.yaml", whole, map[string]string{
		"services gateway-1 environment HEADCOUNT_API_KEY": "${HEADCOUNT_API_KEY:?set it to a long random value}",
	})
}

// What compose.yaml gives to Prometheus and Grafana has only known fields, and fits together.
func TestMonitoring(t *testing.T) {
	all := map[string]any{}
	for _, name := range []string{"prometheus.yaml", "grafana/datasource.yaml", "grafana/dashboards.yaml"} {
		all[name] = parsed(t, file(t, name))
		strict(t, name, all[name])
	}

	prometheus := all["prometheus.yaml"]
	sources := all["grafana/datasource.yaml"]
	boards := all["grafana/dashboards.yaml"]

	must(t, "Prometheus", prometheus, map[string]string{"rule_files 1": "<nil>", "scrape_configs 1": "<nil>"})
	must(t, "Grafana's sources", sources, map[string]string{
		"apiVersion": "1", "datasources 0 type": "prometheus", "datasources 0 url": "http://prometheus:9090",
		"datasources 0 isDefault": "true", "datasources 1": "<nil>",
	})
	must(t, "Grafana's boards", boards, map[string]string{"apiVersion": "1", "providers 1": "<nil>"})

	compose := string(file(t, "compose.yaml"))
	for _, mount := range []string{
		"./prometheus.yaml:/etc/prometheus/prometheus.yml:ro",
		"./alerts.yaml:" + says(prometheus, "rule_files 0") + ":ro",
		"./grafana.json:" + says(boards, "providers 0 options path") + "/",
		"./grafana/datasource.yaml:/etc/grafana/provisioning/datasources/",
		"./grafana/dashboards.yaml:/etc/grafana/provisioning/dashboards/",
	} {
		if !strings.Contains(compose, mount) {
			t.Errorf("compose.yaml does not have %s", mount)
		}
	}
}

// All jobs of the dashboard are those of Headcount: every program has metrics such as process_cpu_seconds_total.
func TestTheBoardShowsNoOtherPrograms(t *testing.T) {
	var board struct {
		Templating struct {
			List []struct{ Name, Query, AllValue string }
		}
	}
	if err := json.Unmarshal(file(t, "grafana.json"), &board); err != nil {
		t.Fatal(err)
	}

	for _, v := range board.Templating.List {
		if v.Name == "job" && (v.AllValue != "" || v.Query != "label_values(headcount_ready, job)") {
			t.Errorf("the jobs are %s, and all of them %q; want those with headcount_ready, and no others",
				v.Query, v.AllValue)
		}
	}
}
