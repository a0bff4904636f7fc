package deploy_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"headcount/internal/testkit"
)

// Helm takes minutes to compile, so these tests render the chart themselves, with the few functions of Helm that the
// chart uses; make chart runs the real Helm.
var helmFunctions = template.FuncMap{
	"add": func(a, b any) int { return number(a) + number(b) },
	"default": func(otherwise, value any) any {
		if value == nil || value == "" {
			return otherwise
		}
		return value
	},
	"dict": dict,
	"fail": func(message string) (string, error) { return "", errors.New(message) },
	"has":  func(one any, list []any) bool { return slices.Contains(list, one) },
	"indent": func(n int, text string) string {
		return strings.ReplaceAll("\n"+text, "\n", "\n"+strings.Repeat(" ", n))[1:]
	},
	"int":        number,
	"list":       func(all ...any) []any { return all },
	"merge":      merge,
	"regexMatch": func(pattern, text string) bool { return regexp.MustCompile(pattern).MatchString(text) },
	"sha256sum":  func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
	"toJson":     func(value any) (string, error) { text, err := json.Marshal(value); return string(text), err },
	"uniq":       func(list []any) []any { return slices.Compact(slices.SortedFunc(slices.Values(list), compare)) },
}

func compare(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }

func number(value any) int {
	n, _ := strconv.Atoi(fmt.Sprint(value)) // 0 if it is none, as in Helm
	return n
}

func dict(pairs ...any) map[string]any {
	all := map[string]any{}
	for pair := range slices.Chunk(pairs, 2) {
		all[fmt.Sprint(pair[0])] = pair[1]
	}

	return all
}

// merge adds the fields that a map lacks.
func merge(into map[string]any, others ...map[string]any) map[string]any {
	for _, from := range others {
		for name, value := range from {
			if _, ok := into[name]; !ok {
				into[name] = value
			}
		}
	}

	return into
}

// override replaces values of the chart by those of a user, field by field.
func override(values, with map[string]any) {
	for name, value := range with {
		below, ok := values[name].(map[string]any)
		if fields, is := value.(map[string]any); ok && is {
			override(below, fields)
		} else {
			values[name] = value
		}
	}
}

// chartFiles is .Files of a template.
type chartFiles struct{}

func (chartFiles) Get(name string) (string, error) {
	text, err := os.ReadFile("helm/" + name)
	return string(text), err
}

// chartValues returns the values of the chart with those of a set over them.
func chartValues(t *testing.T, set string) map[string]any {
	t.Helper()
	values, user := map[string]any{}, map[string]any{}

	err := errors.Join(yaml.Unmarshal(file(t, "helm/values.yaml"), &values), yaml.Unmarshal([]byte(set), &user))
	if err != nil {
		t.Fatal(err)
	}

	override(values, user)
	return values
}

// render returns the objects of the chart by kind and name. The release is called hc.
func render(t *testing.T, set string) (map[string]any, error) {
	t.Helper()
	values := chartValues(t, set)

	// include is a function of Helm that needs the templates themselves.
	all := template.New("")
	include := func(name string, data any) (string, error) {
		var out strings.Builder
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}

	_, err := all.Funcs(helmFunctions).Funcs(template.FuncMap{"include": include}).ParseGlob("helm/templates/*")
	if err != nil {
		t.Fatal(err)
	}

	objects := map[string]any{}
	for _, one := range all.Templates() {
		if !strings.HasSuffix(one.Name(), ".yaml") {
			continue // a template without objects
		}

		var out strings.Builder
		data := map[string]any{"Values": values, "Release": map[string]any{"Name": "hc"}, "Files": chartFiles{}}
		if err := one.Execute(&out, data); err != nil {
			return nil, err
		}

		for text := range strings.SplitSeq(out.String(), "\n---\n") {
			o := parsed(t, []byte(text))
			if o == nil {
				continue
			}

			name := says(o, "kind") + " " + says(o, "metadata name")
			if objects[name] != nil {
				t.Errorf("the chart has two objects %s", name)
			}
			objects[name] = o
		}
	}
	return objects, nil
}

// chartSets returns the sets of values in helm/ci by name.
func chartSets(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("helm/ci/*-values.yaml")
	if err != nil || len(paths) < 5 {
		t.Fatal(paths, err)
	}

	sets := map[string]string{}
	for _, path := range paths {
		set, _ := strings.CutSuffix(filepath.Base(path), "-values.yaml")
		sets[set] = string(file(t, path))
	}
	return sets
}

// For each set of values in helm/ci the chart renders the right objects.
func TestChart(t *testing.T) {
	for set, values := range chartSets(t) {
		t.Run(set, func(t *testing.T) {
			objects, err := render(t, values)
			if err != nil {
				t.Fatal(err)
			}

			// Expected are one Deployment and budget per role, and the objects that the set asks for.
			roles := []string{"all"}
			if set == "roles" || set == "region" {
				roles = []string{"gateway", "presence", "dispatcher"}
			}

			kinds := map[string]int{"Service": 1, "NetworkPolicy": 2, "ConfigMap": 1, "Job": 1}
			kinds["Deployment"], kinds["PodDisruptionBudget"] = len(roles), len(roles)
			switch set {
			case "default":
				kinds["PersistentVolumeClaim"] = 1
			case "pods":
				kinds["PersistentVolumeClaim"], kinds["ServiceAccount"] = 1, 1
			case "region":
				kinds["HorizontalPodAutoscaler"], kinds["Service"] = 1, 2
				kinds["ServiceMonitor"], kinds["PrometheusRule"] = 1, 1
			}

			got := map[string]int{}
			for _, o := range objects {
				got[says(o, "kind")]++
				schema := says(o, "apiVersion") + " " + says(o, "kind")
				if schemas[schema] == "" {
					t.Errorf("there is no schema to check %s", schema)
				}
				strict(t, schema, o)
			}

			if !maps.Equal(got, kinds) {
				t.Errorf("the objects are %v, want %v", got, kinds)
			}

			all := chartValues(t, values)
			for _, role := range roles {
				checkRole(t, role, objects, all)
			}
			checkReferences(t, objects)

			metrics := at(objects["NetworkPolicy hc"], "spec ingress 1")
			must(t, "the policy of metrics", metrics, map[string]string{
				"from 0 namespaceSelector matchLabels": fmt.Sprint(map[string]any{
					"kubernetes.io/metadata.name": says(all, "monitoring namespace"),
				}),
				"from 1": "<nil>", "ports 0 port": "admin", "ports 1": "<nil>",
			})
		})
	}
}

const (
	pod       = "spec template spec "
	container = pod + "containers 0 "
	component = "app.kubernetes.io/component"
)

// checkRole checks the processes of a role.
func checkRole(t *testing.T, role string, objects, values map[string]any) {
	t.Helper()
	d := objects["Deployment hc-"+role]
	visitors := role == "all" || role == "gateway"
	must(t, role, d, map[string]string{
		"spec template metadata labels " + component: role, "spec selector matchLabels " + component: role,
		pod + "containers 1": "<nil>",
		container + "image":  says(values, "image"),

		// Kubernetes gives pods variables for each Service, and for one called headcount such as HEADCOUNT_PORT.
		pod + "enableServiceLinks": "false",
		// Without the group the process may not write to a new volume.
		pod + "securityContext fsGroup":      "65532",
		pod + "securityContext runAsNonRoot": "true", container + "securityContext readOnlyRootFilesystem": "true",
		container + "securityContext allowPrivilegeEscalation": "false",
		container + "securityContext capabilities drop":        "[ALL]",
		container + "livenessProbe httpGet path":               "/healthz",
		container + "startupProbe httpGet path":                "/healthz",
		container + "readinessProbe httpGet path": map[bool]string{true: "/readyz?exclude=store",
			false: "/readyz"}[visitors],
	})

	must(t, "the budget of "+role, objects["PodDisruptionBudget hc-"+role], map[string]string{
		"spec selector matchLabels " + component: role, "spec maxUnavailable": "1",
	})

	if visitors {
		must(t, "the service", objects["Service hc"], map[string]string{
			"spec selector " + component: role, "spec ports 0 targetPort": "visitors",
		})
		must(t, "the policy of "+role, objects["NetworkPolicy hc-"+role],
			map[string]string{"spec podSelector matchLabels " + component: role})
	}

	if secret := says(values, "existingSecret"); secret != "" {
		must(t, role, d, map[string]string{container + "envFrom 0 secretRef name": secret})
	}

	// The pod needs time to drain, after its Service has noticed the end and before Kubernetes kills it.
	env := environment(d)
	drain := at(values, "shutdownSeconds")
	if got, want := env["HEADCOUNT_SHUTDOWN_TIMEOUT"], fmt.Sprintf("%vs", drain); got != want {
		t.Errorf("%s drains for %s, want %s", role, got, want)
	}
	grace := number(at(d, pod+"terminationGracePeriodSeconds"))
	sleep := number(at(d, container+"lifecycle preStop sleep seconds"))
	if sleep == 0 || grace-sleep <= number(drain) {
		t.Errorf("%s has no time to drain: of %d s it sleeps %d", role, grace, sleep)
	}

	// The open ports are those that the program listens on.
	variables := map[string]string{
		"visitors": "HEADCOUNT_LISTEN", "admin": "HEADCOUNT_ADMIN_LISTEN",
		"cluster": "HEADCOUNT_CLUSTER_LISTEN", "beats": "HEADCOUNT_CLUSTER_LISTEN",
	}

	open, _ := at(d, container+"ports").([]any)
	for _, p := range open {
		if name := says(p, "name"); env[variables[name]] != ":"+says(p, "containerPort") {
			t.Errorf("%s listens on %q for %s, which is not its port", role, env[variables[name]], name)
		}
	}

	if got := env["HEADCOUNT_ADVERTISE"]; got != "127.0.0.1"+env["HEADCOUNT_CLUSTER_LISTEN"] {
		t.Errorf("%s advertises %q, which is not its address", role, got)
	}

	if want := map[bool]string{false: role}[role == "all"]; env["HEADCOUNT_ROLES"] != want {
		t.Errorf("the roles of %s are %q, want %q", role, env["HEADCOUNT_ROLES"], want)
	}

	if scaler := objects["HorizontalPodAutoscaler hc-"+role]; scaler != nil {
		must(t, "the autoscaler", scaler, map[string]string{
			"spec scaleTargetRef name": "hc-" + role, "spec metrics 0 pods metric name": "headcount_connections",
			"spec metrics 1": "<nil>",
		})
		must(t, "processes whose number the autoscaler sets", d, map[string]string{"spec replicas": "<nil>"})
	} else if number(at(d, "spec replicas")) == 0 {
		t.Errorf("%s has no replicas", role)
	}
	// A process without Redis runs alone: next to another one it could not open the volume, or each would count alone.
	alone := role == "all" && says(d, "spec replicas") == "1"
	must(t, role, d, map[string]string{"spec strategy type": map[bool]string{true: "Recreate", false: "<nil>"}[alone]})

	if env["HEADCOUNT_DATA_DIR"] != "" {
		must(t, "a process with a volume", d, map[string]string{
			"spec replicas": "1", pod + "volumes 1 persistentVolumeClaim claimName": "hc",
			container + "volumeMounts 1 mountPath": env["HEADCOUNT_DATA_DIR"],
		})
		must(t, "the volume", objects["PersistentVolumeClaim hc"],
			map[string]string{"metadata annotations helm.sh/resource-policy": "keep"})
	}
}

// environment returns the variables of a Deployment's process.
func environment(deployment any) map[string]string {
	env := map[string]string{}
	address := "$(POD_IP)" // Kubernetes replaces only variables that are defined above

	all, _ := at(deployment, container+"env").([]any)
	for _, one := range all {
		if says(one, "name") == "POD_IP" && says(one, "valueFrom fieldRef fieldPath") == "status.podIP" {
			address = "127.0.0.1"
		}
		if value, ok := at(one, "value").(string); ok {
			env[says(one, "name")] = strings.ReplaceAll(value, "$(POD_IP)", address)
		}
	}

	return env
}

// The program accepts the settings of each process of each set.
func TestServerChartSettings(t *testing.T) {
	for set, values := range chartSets(t) {
		objects, err := render(t, values)
		if err != nil {
			t.Fatal(err)
		}

		for name, o := range objects {
			if kind := says(o, "kind"); kind == "Deployment" || kind == "Job" {
				checkSettings(t, set+" "+name, o, objects["ConfigMap hc"])
			}
		}
	}
}

// checkSettings lets the program judge the settings of a process. The program may complain about the store (status 1),
// which does not exist here, but not about a setting (status 2).
func checkSettings(t *testing.T, process string, deployment, config any) {
	t.Helper()
	env := environment(deployment)
	dir := t.TempDir()
	for name, text := range at(config, "data").(map[string]any) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text.(string)), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	cmd := exec.Command(binary, "check", "--config", filepath.Join(dir, "headcount.json"),
		"--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--cluster-listen", ":0")
	cmd.Env = testkit.Environ()
	if at(deployment, container+"envFrom") != nil && env["HEADCOUNT_DATA_DIR"] == "" {
		// These come from the Secret that the chart expects.
		cmd.Env = append(cmd.Env, "HEADCOUNT_REDIS=redis://127.0.0.1:1",
			"HEADCOUNT_CLUSTER_SECRET="+strings.Repeat("x", 32))
	}

	// Paths in the container become paths of the test.
	for name, value := range env {
		switch name {
		case "HEADCOUNT_DATA_DIR":
			value = t.TempDir()
		case "HEADCOUNT_COUNTERS":
			value = filepath.Join(dir, filepath.Base(value))
		}

		cmd.Env = append(cmd.Env, name+"="+value)
	}

	said, err := cmd.CombinedOutput()
	code := cmd.ProcessState.ExitCode()
	if code != 0 && code != 1 {
		t.Errorf("%s: the settings %v are not those of the program: %v\n%s", process, env, err, said)
	}
}

// checkReferences reports policies that choose no pods, or open ports that no process has, and objects that the
// monitoring does not choose.
func checkReferences(t *testing.T, objects map[string]any) {
	t.Helper()
	ports := map[string]bool{}
	var pods []map[string]any // their labels
	for _, o := range objects {
		all, _ := at(o, container+"ports").([]any)
		for _, p := range all {
			ports[says(p, "name")] = true
		}
		if labels, ok := at(o, "spec template metadata labels").(map[string]any); ok {
			pods = append(pods, labels)
		}
	}

	// chosen returns how many of the label sets a selector matches, as Kubernetes does.
	chosen := func(by any, from ...map[string]any) (n int) {
		selector, _ := by.(map[string]any)
		for _, labels := range from {
			if reflect.DeepEqual(labels, merge(maps.Clone(selector), labels)) {
				n++
			}
		}
		return n
	}

	for name, o := range objects {
		if says(o, "kind") != "NetworkPolicy" {
			continue
		}
		// Only ingress: the processes must reach Redis, PostgreSQL and receivers of webhooks.
		must(t, name, o, map[string]string{"spec policyTypes": "[Ingress]"})

		want := len(pods)
		if name != "NetworkPolicy hc" {
			want = 1
		}
		if n := chosen(at(o, "spec podSelector matchLabels"), pods...); n != want {
			t.Errorf("%s chooses %d Deployments of %v, want %d", name, n, pods, want)
		}

		ingress, _ := at(o, "spec ingress").([]any)
		for _, in := range ingress {
			if at(in, "from 0 podSelector") != nil &&
				chosen(at(in, "from 0 podSelector matchLabels"), pods...) != len(pods) {
				t.Errorf("%s lets in %v, and not all of %v", name, at(in, "from"), pods)
			}

			all, _ := at(in, "ports").([]any)
			for _, p := range all {
				if !ports[says(p, "port")] {
					t.Errorf("%s opens %q, a port that no process has", name, says(p, "port"))
				}
			}
		}
	}

	monitor := objects["ServiceMonitor hc"]
	if monitor == nil {
		return
	}

	// The monitor must scrape the admin Service, and not the one for visitors.
	admin, _ := at(objects["Service hc-admin"], "metadata labels").(map[string]any)
	site, _ := at(objects["Service hc"], "metadata labels").(map[string]any)
	by := at(monitor, "spec selector matchLabels")
	if chosen(by, admin) != 1 || chosen(by, site) != 0 {
		t.Errorf("the monitor chooses by %v", by)
	}

	if n := chosen(at(objects["Service hc-admin"], "spec selector"), pods...); n != len(pods) {
		t.Errorf("the monitor scrapes %d of %d Deployments", n, len(pods))
	}

	rules := objects["PrometheusRule hc"]
	must(t, "the monitor", monitor, map[string]string{
		"metadata labels release": "prometheus",
		"spec endpoints 0 port":   says(objects["Service hc-admin"], "spec ports 0 name"),
	})
	must(t, "the alerts", rules, map[string]string{"metadata labels release": "prometheus"})
	want := at(parsed(t, file(t, "alerts.yaml")), "groups")
	if want == nil || !reflect.DeepEqual(at(rules, "spec groups"), want) {
		t.Errorf("the alerts are %v, want %v", at(rules, "spec groups"), want)
	}
}

// The chart refuses values that cannot work before anything is installed.
func TestChartRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ values, want string }{
		"a role that does not exist": {`roles: [gateways]`, "is none of all, gateway"},
		"a value that is no role":    {`roles: [monitoring]`, "is none of all, gateway"},
		"a role that is a number":    {`roles: [1]`, "is none of all, gateway"},
		"no role":                    {`roles: []`, "empty"},
		"a role twice":               {`{existingSecret: s, roles: [gateway, presence, gateway]}`, "once"},
		"all and another role":       {`{existingSecret: s, persistence: {size: ""}, roles: [all, gateway]}`, "alone"},
		"seconds with a unit":        {`shutdownSeconds: 90s`, "whole number"},
		"half a second":              {`shutdownSeconds: 0.5`, "whole number"},
		"a negative time":            {`shutdownSeconds: -1`, "whole number"},
		"roles without Redis":        {`roles: [gateway, presence, dispatcher]`, "existingSecret"},
		"replicas of one volume":     {`{existingSecret: s, all: {replicas: 2}}`, "persistence.size"},
		"a scaled volume":            {`{existingSecret: s, all: {maxReplicas: 2}}`, "persistence.size"},
		"replicas without Redis":     {`{persistence: {size: ""}, all: {replicas: 2}}`, "existingSecret"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := render(t, tc.values); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("the error is %v, want %q", err, tc.want)
			}
		})
	}
}

// Pods get the operator's fields, and a Service its kind, in addition to what the chart needs, not instead of it.
func TestChartOfPods(t *testing.T) {
	objects, err := render(t, chartSets(t)["pods"])
	if err != nil {
		t.Fatal(err)
	}

	const labels = "spec template metadata labels "
	deployment := objects["Deployment hc-all"]
	must(t, "the pods", deployment, map[string]string{
		labels + "team": "web", labels + "app.kubernetes.io/name": "headcount",
		"spec template metadata annotations sidecar.istio.io/inject": "false",
		"spec selector matchLabels team":                             "<nil>",
		container + "volumeMounts 2 mountPath":                       "/etc/tls",
		pod + "volumes 2 secret secretName":                          "tls",
	})

	if says(deployment, "spec template metadata annotations checksum/settings") == "<nil>" {
		t.Error("the pods do not restart with their settings")
	}

	for _, o := range []any{deployment, objects["Job hc-check"]} {
		must(t, says(o, "kind"), o, map[string]string{
			pod + "nodeSelector": "map[kubernetes.io/arch:arm64]", pod + "tolerations 0 key": "dedicated",
			pod + "priorityClassName": "high", pod + "serviceAccountName": "hc",
			pod + "automountServiceAccountToken": "false",
		})

		if at(o, pod+"affinity nodeAffinity") == nil {
			t.Errorf("%s has no affinity", says(o, "kind"))
		}
		if env := environment(o); env["SSL_CERT_FILE"] != "/etc/tls/ca.pem" || env["HEADCOUNT_LISTEN"] != ":8080" {
			t.Errorf("%s has the variables %v", says(o, "kind"), env)
		}
	}

	must(t, "the service", objects["Service hc"], map[string]string{
		"spec type": "LoadBalancer",
		"metadata annotations service.beta.kubernetes.io/aws-load-balancer-type": "nlb",
	})

	must(t, "the account", objects["ServiceAccount hc"], map[string]string{
		"metadata annotations eks.amazonaws.com/role-arn": "headcount", "automountServiceAccountToken": "false",
	})
}

// Helm refuses values that are not in the schema before it renders anything.
func TestChartSchema(t *testing.T) {
	schema, err := jsonschema.NewCompiler().Compile("helm/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}

	validate := func(set string) error {
		text, err := json.Marshal(chartValues(t, set)) // as JSON, whose numbers are those of the schema
		if err != nil {
			t.Fatal(err)
		}
		values, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}

		return schema.Validate(values)
	}

	for name, set := range chartSets(t) {
		if err := validate(set); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Typing errors of operators.
	for _, set := range []string{
		`replicas: 3`, `{all: {replica: 3}}`, `{gateway: {resources: {limit: {}}}}`, `{persistence: {class: fast}}`,
		`{settings: {update-intervall: 1s}}`, `{settings: {origins: []}}`, `{service: {type: Loadbalancer}}`,
		`{monitoring: {enabled: "yes"}}`, `{counters: {rule: []}}`, `{extraEnv: [{value: x}]}`,
		`{serviceAccount: {created: true}}`,
		`{shutdownSeconds: 90s}`, `{roles: [gateways]}`,
	} {
		if validate(set) == nil {
			t.Errorf("%s is accepted", set)
		}
	}
}

// The chart has no symbolic links, since archives and some systems do not follow them.
func TestChartHasNoLinks(t *testing.T) {
	err := filepath.WalkDir("helm", func(path string, file fs.DirEntry, err error) error {
		if err == nil && file.Type()&fs.ModeSymlink != 0 {
			t.Errorf("%s is a link", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	if !bytes.Equal(file(t, "alerts.yaml"), file(t, "helm/alerts.yaml")) {
		t.Error("the chart has other alerts: cp deploy/alerts.yaml deploy/helm/")
	}
}
