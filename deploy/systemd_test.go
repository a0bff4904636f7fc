package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// The unit uses only directives of systemd.unit(5), systemd.service(5) and systemd.exec(5) that are listed here. Any
// other one counts as a mistake.
func TestUnit(t *testing.T) {
	const yes, span = `yes|no`, `\d+s`
	known := map[string]map[string]string{ // the permitted values of each directive
		"Unit": {
			"Description": `.+`, "Documentation": `man:headcount\(8\)`, "After": `[a-z-]+\.target`,
			"Wants": `[a-z-]+\.target`, "StartLimitIntervalSec": `0`,
		},
		"Service": {
			"ExecStart":      `/\S+ serve --config \$\{CREDENTIALS_DIRECTORY\}/headcount\.json`,
			"LoadCredential": `headcount\.json:/\S+`, "StateDirectory": `[a-z]+`, "StateDirectoryMode": `0[0-7]{3}`,
			"UMask":   `0[0-7]{3}`,
			"Restart": `no|always|on-failure|on-abnormal`, "RestartSec": span, "RestartPreventExitStatus": `\d+`,
			"TimeoutStopSec": span, "LimitNOFILE": `\d+`,
			"DynamicUser": yes, "AmbientCapabilities": `CAP_NET_BIND_SERVICE`,
			"CapabilityBoundingSet": `CAP_NET_BIND_SERVICE`, "NoNewPrivileges": yes,
			"ProtectSystem": `yes|full|strict`, "ProtectHome": yes + `|read-only|tmpfs`,
			"ProtectProc": `default|invisible|noaccess|ptraceable`,
			"PrivateTmp":  yes, "PrivateDevices": yes, "ProtectKernelTunables": yes, "ProtectKernelModules": yes,
			"ProtectKernelLogs": yes, "ProtectControlGroups": yes, "ProtectClock": yes, "ProtectHostname": yes,
			"RestrictAddressFamilies": `AF_[A-Z0-9]+( AF_[A-Z0-9]+)*`, "RestrictNamespaces": yes,
			"RestrictRealtime": yes, "RestrictSUIDSGID": yes, "LockPersonality": yes, "MemoryDenyWriteExecute": yes,
			"RemoveIPC":               yes,
			"SystemCallArchitectures": `native`, "SystemCallFilter": `~?@[a-z-]+`, "SystemCallErrorNumber": `EPERM`,
		},
		"Install": {"WantedBy": `multi-user\.target`},
	}

	said := map[string][]string{}
	section := ""
	for line := range strings.Lines(string(file(t, "headcount.service"))) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] == '[' {
			section = strings.Trim(line, "[]")
			if known[section] == nil {
				t.Errorf("there is no section %s", section)
			}

			continue
		}

		name, value, _ := strings.Cut(line, "=")
		switch pattern := known[section][name]; {
		case pattern == "":
			t.Errorf("[%s] knows no %q", section, line)
		case !regexp.MustCompile(`^(?:` + pattern + `)$`).MatchString(value):
			t.Errorf("%s may not be %q", name, value)
		default:
			said[name] = append(said[name], value)
		}
	}

	for _, name := range []string{
		"DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables",
		"ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups",
		"RestrictNamespaces", "RestrictSUIDSGID", "MemoryDenyWriteExecute",
	} {
		if !slices.Equal(said[name], []string{"yes"}) {
			t.Errorf("%s is %q", name, said[name])
		}
	}

	one := func(name string) string { return strings.Join(said[name], " and ") }
	if one("Restart") != "always" || one("StartLimitIntervalSec") != "0" {
		t.Errorf("it does not start again however often it ends: %q, %q", one("Restart"), one("StartLimitIntervalSec"))
	}

	if status := one("RestartPreventExitStatus"); status != "2" {
		t.Errorf("settings that are refused, status 2, are tried again for ever: %q", status)
	}

	dir := says(parsed(t, file(t, "headcount.json")), "data-dir")
	if one("ProtectSystem") != "strict" || dir != "/var/lib/"+one("StateDirectory") {
		t.Errorf("the process may write where it should not, or not into its data directory: %q, %q, %q",
			one("ProtectSystem"), one("StateDirectory"), dir)
	}
	// The timeout must exceed the default of --shutdown-timeout.
	if stop, err := time.ParseDuration(one("TimeoutStopSec")); err != nil || stop <= 30*time.Second {
		t.Errorf("it has no time to drain: %v, %v", stop, err)
	}
}

// The scripts of the packages know how dpkg and rpm call them, and succeed even when systemctl fails.
func TestServerPackageScripts(t *testing.T) {
	const restart, stop = "daemon-reload\ntry-restart headcount.service\n", "disable --now headcount.service\n"
	dir := t.TempDir()
	calls := filepath.Join(dir, "calls")

	// A systemctl that notes its arguments and fails.
	fake := "#!/bin/sh\necho \"$@\" >>'" + calls + "'\nexit 1\n"
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct{ script, args, root, systemd, want string }{
		"deb install":         {script: "postinstall.sh", args: "configure", systemd: dir, want: restart},
		"deb upgrade, before": {script: "preremove.sh", args: "upgrade 1.2.4", systemd: dir},
		"deb upgrade, after":  {script: "postinstall.sh", args: "configure 1.2.3", systemd: dir, want: restart},
		"deb remove":          {script: "preremove.sh", args: "remove", systemd: dir, want: stop},
		"rpm install":         {script: "postinstall.sh", args: "1", systemd: dir, want: restart},
		"rpm upgrade, new":    {script: "postinstall.sh", args: "2", systemd: dir, want: restart},
		"rpm upgrade, old":    {script: "preremove.sh", args: "1", systemd: dir},
		"rpm remove":          {script: "preremove.sh", args: "0", systemd: dir, want: stop},
		"no systemd":          {script: "postinstall.sh", args: "configure", systemd: "/none"},
		"no systemd, remove":  {script: "preremove.sh", args: "remove", systemd: "/none"},
		"another root":        {script: "postinstall.sh", args: "configure", root: "/mnt", systemd: dir},
		"another, remove":     {script: "preremove.sh", args: "remove", root: "/mnt", systemd: dir},
	} {
		if err := os.WriteFile(calls, nil, 0o600); err != nil {
			t.Fatal(err)
		}

		cmd := exec.Command("sh", append([]string{tc.script}, strings.Fields(tc.args)...)...)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"),
			"SYSTEMD_RUNNING="+tc.systemd, "DPKG_ROOT="+tc.root)
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, said)
		}

		if got := string(file(t, calls)); got != tc.want {
			t.Errorf("%s: it calls systemctl with %q, want %q", name, got, tc.want)
		}
	}
}

// An archive contains every file that the head of the unit tells to install by hand, and settings are not overwritten.
func TestInstallByHand(t *testing.T) {
	installs := regexp.MustCompile(`(?m)^#\t(.*)install -m \d+ (\S+) (\S+)$`).FindAllStringSubmatch(
		string(file(t, "headcount.service")), -1)
	if len(installs) != 3 {
		t.Fatalf("the head of the unit says %q", installs)
	}

	for _, one := range installs {
		guard, from, to := one[1], one[2], one[3]
		if _, err := os.Stat(filepath.Join("..", from)); err != nil && from != "headcount" { // the program
			t.Error(err)
		}
		if strings.HasSuffix(from, ".json") && guard != "[ -e "+to+filepath.Base(from)+" ] || " {
			t.Errorf("%q overwrites settings", one[0])
		}
	}
}
