package deploy_test

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// The files for Kubernetes and for Docker are checked against the part of their schemas
// that they use: a field that is not here is taken for a mistake. What the fields must say
// is checked below.

type labels = map[string]string

type selector struct {
	MatchLabels labels `yaml:"matchLabels"`
}

type probe struct {
	HTTPGet struct {
		Path, Port string
	} `yaml:"httpGet"`
	PeriodSeconds    int `yaml:"periodSeconds"`
	TimeoutSeconds   int `yaml:"timeoutSeconds"`
	FailureThreshold int `yaml:"failureThreshold"`
}

type ref struct{ Name string }

type pod struct {
	AutomountServiceAccountToken  *bool `yaml:"automountServiceAccountToken"`
	EnableServiceLinks            *bool `yaml:"enableServiceLinks"`
	TerminationGracePeriodSeconds int   `yaml:"terminationGracePeriodSeconds"`
	SecurityContext               struct {
		RunAsNonRoot   bool                  `yaml:"runAsNonRoot"`
		RunAsUser      int                   `yaml:"runAsUser"`
		RunAsGroup     int                   `yaml:"runAsGroup"`
		SeccompProfile struct{ Type string } `yaml:"seccompProfile"`
	} `yaml:"securityContext"`
	TopologySpreadConstraints []struct {
		MaxSkew           int      `yaml:"maxSkew"`
		TopologyKey       string   `yaml:"topologyKey"`
		WhenUnsatisfiable string   `yaml:"whenUnsatisfiable"`
		LabelSelector     selector `yaml:"labelSelector"`
	} `yaml:"topologySpreadConstraints"`
	Containers []struct {
		Name, Image string
		Args        []string
		EnvFrom     []struct {
			ConfigMapRef *ref `yaml:"configMapRef"`
			SecretRef    *ref `yaml:"secretRef"`
		} `yaml:"envFrom"`
		Env []struct {
			Name, Value string
			ValueFrom   struct {
				FieldRef struct {
					FieldPath string `yaml:"fieldPath"`
				} `yaml:"fieldRef"`
			} `yaml:"valueFrom"`
		}
		Ports []struct {
			Name, Protocol string
			ContainerPort  int `yaml:"containerPort"`
		}
		StartupProbe   probe `yaml:"startupProbe"`
		LivenessProbe  probe `yaml:"livenessProbe"`
		ReadinessProbe probe `yaml:"readinessProbe"`
		Lifecycle      struct {
			PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
		}
		Resources       struct{ Requests, Limits map[string]string }
		SecurityContext struct {
			AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
			ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
			Capabilities             struct{ Drop []string }
		} `yaml:"securityContext"`
	}
}

type Object struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct {
		Name   string
		Labels labels
	}
}

type deployment struct {
	Object `yaml:",inline"`
	Spec   struct {
		Replicas int
		Selector selector
		Strategy struct {
			RollingUpdate struct {
				MaxUnavailable int `yaml:"maxUnavailable"`
				MaxSurge       int `yaml:"maxSurge"`
			} `yaml:"rollingUpdate"`
		}
		Template struct {
			Metadata struct{ Labels labels }
			Spec     pod
		}
	}
}

type budget struct {
	Object `yaml:",inline"`
	Spec   struct {
		MaxUnavailable int `yaml:"maxUnavailable"`
		Selector       selector
	}
}

type service struct {
	Object `yaml:",inline"`
	Spec   struct {
		Selector labels
		Ports    []struct {
			Name   string
			Port   int
			Target string `yaml:"targetPort"`
		}
	}
}

type autoscaler struct {
	Object `yaml:",inline"`
	Spec   struct {
		ScaleTargetRef struct {
			APIVersion string `yaml:"apiVersion"`
			Kind, Name string
		} `yaml:"scaleTargetRef"`
		MinReplicas int `yaml:"minReplicas"`
		MaxReplicas int `yaml:"maxReplicas"`
		Metrics     []struct {
			Type string
			Pods struct {
				Metric ref
				Target struct {
					Type         string
					AverageValue string `yaml:"averageValue"`
				}
			}
		}
		Behavior struct {
			ScaleDown struct {
				StabilizationWindowSeconds int `yaml:"stabilizationWindowSeconds"`
				Policies                   []struct {
					Type          string
					Value         int
					PeriodSeconds int `yaml:"periodSeconds"`
				}
			} `yaml:"scaleDown"`
		}
	}
}

type networkPolicy struct {
	Object `yaml:",inline"`
	Spec   struct {
		PodSelector selector `yaml:"podSelector"`
		PolicyTypes []string `yaml:"policyTypes"`
		Ingress     []struct {
			From []struct {
				PodSelector       selector `yaml:"podSelector"`
				NamespaceSelector selector `yaml:"namespaceSelector"`
			}
			Ports []struct{ Port, Protocol string }
		}
	}
}

type configMap struct {
	Object `yaml:",inline"`
	Data   map[string]string
}

type kustomization struct {
	Object    `yaml:",inline"`
	Labels    []struct{ Pairs labels }
	Resources []string
	Images    []struct {
		Name    string
		NewName string `yaml:"newName"`
		NewTag  string `yaml:"newTag"`
	}
}

// strict reads text into what it should be, and refuses fields that are unknown.
func strict(t *testing.T, name string, text []byte, into any) {
	t.Helper()
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(into); err != nil && !errors.Is(err, io.EOF) {
		t.Fatalf("%s: %v", name, err)
	}
}

func file(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestKubernetes(t *testing.T) {
	var k kustomization
	strict(t, "kustomization.yaml", file(t, "kubernetes/kustomization.yaml"), &k)
	deployments, budgets, ports := map[string]deployment{}, map[string]budget{}, map[string]bool{}
	var scaler autoscaler
	var settings configMap
	var policies []networkPolicy
	all, _ := filepath.Glob("kubernetes/*.yaml")
	if len(all) != len(k.Resources)+1 {
		t.Errorf("%d files, %d resources", len(all), len(k.Resources))
	}
	for _, name := range k.Resources {
		for _, text := range bytes.Split(file(t, "kubernetes/"+name), []byte("\n---\n")) {
			var o Object
			if err := yaml.Unmarshal(text, &o); err != nil {
				t.Fatal(err)
			}
			switch o.APIVersion + " " + o.Kind {
			case "apps/v1 Deployment":
				var d deployment
				strict(t, name, text, &d)
				deployments[d.Metadata.Name] = d
			case "policy/v1 PodDisruptionBudget":
				var b budget
				strict(t, name, text, &b)
				budgets[b.Metadata.Name] = b
			case "autoscaling/v2 HorizontalPodAutoscaler":
				strict(t, name, text, &scaler)
			case "networking.k8s.io/v1 NetworkPolicy":
				var n networkPolicy
				strict(t, name, text, &n)
				policies = append(policies, n)
			case "v1 ConfigMap":
				strict(t, name, text, &settings)
			case "v1 Service":
				var s service
				strict(t, name, text, &s)
			default:
				t.Errorf("%s: nobody checks %s of %s", name, o.Kind, o.APIVersion)
			}
		}
	}
	drain, err := time.ParseDuration(settings.Data["HEADCOUNT_SHUTDOWN_TIMEOUT"])
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range []string{"gateway", "presence", "dispatcher"} {
		d := deployments[role]
		spec := d.Spec.Template.Spec
		if len(spec.Containers) != 1 {
			t.Fatalf("%s has %d containers", role, len(spec.Containers))
		}
		c := spec.Containers[0]
		for _, p := range c.Ports {
			ports[p.Name] = true
		}
		switch {
		case d.Spec.Template.Metadata.Labels["app.kubernetes.io/component"] != role || d.Spec.Selector.MatchLabels["app.kubernetes.io/component"] != role:
			t.Errorf("%s does not select its own pods", role)
		case budgets[role].Spec.Selector.MatchLabels["app.kubernetes.io/component"] != role || budgets[role].Spec.MaxUnavailable != 1:
			t.Errorf("%s has no budget", role)
		case !spec.SecurityContext.RunAsNonRoot || !c.SecurityContext.ReadOnlyRootFilesystem || !slices.Equal(c.SecurityContext.Capabilities.Drop, []string{"ALL"}):
			t.Errorf("%s may too much", role)
		case c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" || c.StartupProbe.HTTPGet.Path != "/healthz":
			t.Errorf("%s is asked for something else than its health", role)
		case time.Duration(spec.TerminationGracePeriodSeconds-c.Lifecycle.PreStop.Sleep.Seconds)*time.Second <= drain || c.Lifecycle.PreStop.Sleep.Seconds == 0:
			t.Errorf("%s has no time to drain", role)
		case c.Env[0].Name != "HEADCOUNT_ROLES" || c.Env[0].Value != role:
			t.Errorf("%s has the roles %q", role, c.Env[0].Value)
		}
	}
	if len(policies) == 0 {
		t.Error("there is no NetworkPolicy")
	}
	for _, n := range policies {
		if !slices.Equal(n.Spec.PolicyTypes, []string{"Ingress"}) {
			t.Errorf("the NetworkPolicy %s is of the types %q: Redis, PostgreSQL and receivers of webhooks must be reached", n.Metadata.Name, n.Spec.PolicyTypes)
		}
		for label, value := range n.Spec.PodSelector.MatchLabels {
			if deployments["gateway"].Spec.Template.Metadata.Labels[label] != value {
				t.Errorf("the NetworkPolicy %s is not for gateways: %s is %q", n.Metadata.Name, label, value)
			}
		}
		for _, in := range n.Spec.Ingress {
			for _, p := range in.Ports {
				if !ports[p.Port] {
					t.Errorf("the NetworkPolicy %s opens %q, and nobody has it", n.Metadata.Name, p.Port)
				}
			}
		}
	}
	if s := scaler.Spec; s.ScaleTargetRef.Name != "gateway" || deployments["gateway"].Spec.Replicas != 0 || len(s.Metrics) != 1 || s.Metrics[0].Pods.Metric.Name != "headcount_connections" {
		t.Errorf("the autoscaler is %+v", scaler)
	}
}

// composeService is what compose.yaml says of a service.
type composeService struct {
	Image, Build, Restart, Hostname string
	Command, Ports, Volumes         []string
	Networks                        any
	DependsOn                       any `yaml:"depends_on"`
	Environment                     map[string]string
	Healthcheck                     struct {
		Test              []string
		Interval, Timeout string
		StartPeriod       string `yaml:"start_period"`
		Retries           int
	}
	StopGracePeriod string   `yaml:"stop_grace_period"`
	ReadOnly        bool     `yaml:"read_only"`
	CapDrop         []string `yaml:"cap_drop"`
	SecurityOpt     []string `yaml:"security_opt"`
	Ulimits         any
}

func TestCompose(t *testing.T) {
	text := file(t, "compose.yaml")
	var whole struct {
		Name              string
		Services          map[string]composeService
		Networks, Volumes map[string]any
	}
	if err := yaml.Unmarshal(text, &whole); err != nil {
		t.Fatal(err)
	}
	var raw struct{ Services map[string]any }
	if err := yaml.Unmarshal(text, &raw); err != nil {
		t.Fatal(err)
	}
	all := raw.Services
	for _, name := range []string{"proxy", "gateway-1", "gateway-2", "presence-1", "presence-2", "presence-3", "dispatcher-1", "dispatcher-2", "redis", "postgres", "prometheus", "grafana"} {
		s, ok := whole.Services[name]
		if !ok || s.Image == "" {
			t.Errorf("there is no %s", name)
			continue
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if !strings.HasPrefix(from, "./") {
				if _, ok := whole.Volumes[from]; !ok {
					t.Errorf("%s: there is no volume %s", name, from)
				}
			} else if _, err := os.Stat(from); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, on := range keys(s.DependsOn) {
			if _, ok := whole.Services[on]; !ok {
				t.Errorf("%s: there is no %s to depend on", name, on)
			}
		}
		for _, network := range keys(s.Networks) {
			if _, ok := whole.Networks[network]; !ok {
				t.Errorf("%s: there is no network %s", name, network)
			}
		}
		if s.Image == "headcount" && (!s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || s.Environment["HEADCOUNT_ADVERTISE"] != name+":7946" || !strings.Contains(string(file(t, "prometheus.yaml")), name+":8081")) {
			t.Errorf("%s is not like the others: %+v", name, s)
		}
	}
	if key := whole.Services["gateway-1"].Environment["HEADCOUNT_API_KEY"]; key != "${HEADCOUNT_API_KEY:-}" {
		t.Errorf("the gateways' API key is %q", key)
	}
	for name := range whole.Services {
		text, err := yaml.Marshal(all[name])
		if err != nil {
			t.Fatal(err)
		}
		strict(t, "compose.yaml: "+name, text, &composeService{})
	}
}

// What compose.yaml gives to Prometheus and Grafana is checked in the same way, and fits together.
func TestMonitoring(t *testing.T) {
	var prometheus struct {
		Global struct {
			ScrapeInterval string `yaml:"scrape_interval"`
		}
		RuleFiles     []string `yaml:"rule_files"`
		ScrapeConfigs []struct {
			JobName       string                       `yaml:"job_name"`
			StaticConfigs []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	strict(t, "prometheus.yaml", file(t, "prometheus.yaml"), &prometheus)
	var sources struct {
		APIVersion  int `yaml:"apiVersion"`
		Datasources []struct {
			Name, Type, UID, URL string
			IsDefault            bool `yaml:"isDefault"`
		}
	}
	strict(t, "grafana/datasource.yaml", file(t, "grafana/datasource.yaml"), &sources)
	var boards struct {
		APIVersion int `yaml:"apiVersion"`
		Providers  []struct {
			Name, Type string
			Options    struct{ Path string }
		}
	}
	strict(t, "grafana/dashboards.yaml", file(t, "grafana/dashboards.yaml"), &boards)
	if len(prometheus.RuleFiles) != 1 || len(prometheus.ScrapeConfigs) != 1 || len(sources.Datasources) != 1 || len(boards.Providers) != 1 || sources.APIVersion != 1 || boards.APIVersion != 1 {
		t.Fatalf("%+v\n%+v\n%+v", prometheus, sources, boards)
	}
	compose := string(file(t, "compose.yaml"))
	for _, mount := range []string{
		"./prometheus.yaml:/etc/prometheus/prometheus.yml:ro", "./alerts.yaml:" + prometheus.RuleFiles[0] + ":ro", "./grafana.json:" + boards.Providers[0].Options.Path + "/",
		"./grafana/datasource.yaml:/etc/grafana/provisioning/datasources/", "./grafana/dashboards.yaml:/etc/grafana/provisioning/dashboards/",
	} {
		if !strings.Contains(compose, mount) {
			t.Errorf("compose.yaml does not have %s", mount)
		}
	}
	if s := sources.Datasources[0]; s.Type != "prometheus" || s.URL != "http://prometheus:9090" || !s.IsDefault {
		t.Errorf("Grafana's source is %+v", s)
	}
}

// keys are the names in a list, or of a map.
func keys(v any) []string {
	switch v := v.(type) {
	case map[string]any:
		return slices.Sorted(maps.Keys(v))
	case []any:
		var names []string
		for _, name := range v {
			names = append(names, name.(string))
		}
		return names
	}
	return nil
}

// Every setting that a file here names is one of the program.
func TestSettings(t *testing.T) {
	help, err := exec.Command(binary(t), "serve", "--help").Output()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{"HEADCOUNT_PORT": true} // of compose.yaml itself
	for _, m := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(string(help), -1) {
		known["HEADCOUNT_"+strings.ToUpper(strings.ReplaceAll(m[1], "-", "_"))] = true
	}
	var files []string
	for _, pattern := range []string{"*.yaml", "*.service", "kubernetes/*.yaml"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	seen := 0
	for _, name := range files {
		for _, variable := range regexp.MustCompile(`HEADCOUNT_[A-Z_]*[A-Z]`).FindAllString(string(file(t, name)), -1) {
			seen++
			if !known[variable] {
				t.Errorf("%s: the program has no setting %s", name, variable)
			}
		}
	}
	if seen < 10 {
		t.Errorf("only %d settings were found", seen)
	}
}
