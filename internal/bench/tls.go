//go:build linux

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

// fannedOutOverTLS runs a scenario of the simulator against a server without TLS, then against one with its own TLS,
// and then against one behind an nginx that ends TLS, on the same core.
func fannedOutOverTLS(args ...string) func(*trial) figures {
	return func(t *trial) figures {
		dir := t.TempDir()
		cert, err := servertest.NewLoopbackCertificate(dir)
		if err != nil {
			t.Fatal(err)
		}

		s := t.serve(quick("35ms")...)
		plain := t.simulate(s, args...)
		// Ended, so that the next server has the core to itself.
		s.End(benchenv.EndTime)

		s = t.serve(append(quick("35ms"), "--tls-cert", cert.File, "--tls-key", cert.Key)...)
		s.url = "https://" + s.addr
		s.roots = cert.File
		secured := t.simulate(s, args...)
		s.End(benchenv.EndTime)

		proxied := t.throughNginx(dir, cert, t.serve(quick("35ms")...), args...)
		const cpu, rss = "server_cpu_s_per_million_counts", "server_rss_bytes_per_connection"

		return figures{
			"cpu_s_per_million":       secured[cpu],
			"plain_cpu_s_per_million": plain[cpu],
			"times":                   secured[cpu] / plain[cpu],
			"rss_kb_each":             secured[rss] / 1e3,
			"plain_rss_kb_each":       plain[rss] / 1e3,
			"nginx_cpu_s_per_million": proxied[cpu],
			"nginx_times":             proxied[cpu] / plain[cpu],
			"nginx_rss_kb_each":       proxied["nginx_rss_kb_each"],
		}
	}
}

// nginxConf configures an nginx of one process in front of a server. {dir} has the certificate.
const nginxConf = `daemon off; master_process off; worker_rlimit_nofile 50000;
pid {dir}/nginx.pid; error_log {dir}/error.log crit;
events { worker_connections 40000; }
http {
	access_log off;
	client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/fastcgi;
	uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
	map $http_upgrade $upgrading { default upgrade; '' ''; }
	server {
		listen {listen} ssl backlog=8192;
		ssl_certificate {dir}/cert.pem; ssl_certificate_key {dir}/key.pem;
		location / {
			proxy_pass http://{server};
			proxy_http_version 1.1;
			proxy_set_header Upgrade $http_upgrade;
			proxy_set_header Connection $upgrading;
			proxy_set_header Host $http_host;
			proxy_buffering off;
			proxy_read_timeout 60s;
		}
	}
}
`

// throughNginx is simulate with clients that reach the server through nginx, which terminates TLS. CPU time is that of
// both processes.
func (t *trial) throughNginx(dir string, cert servertest.Certificate, s server, args ...string) figures {
	program, err := exec.LookPath("nginx")
	if err != nil {
		program = "/usr/sbin/nginx" // which a user's PATH may lack
	}

	listen := servertest.FreeAddr()
	conf := filepath.Join(dir, "nginx.conf")
	text := strings.NewReplacer("{dir}", dir, "{listen}", listen, "{server}", s.addr).Replace(nginxConf)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	proxy := &servertest.Process{}
	listens := func(ctx context.Context) error { return servertest.Listens(ctx, listen) }
	t.Cleanup(func() { proxy.End(benchenv.EndTime) })
	cmd := benchenv.On(t.Context(), benchenv.ServerCore, program, "-p", dir, "-c", conf)
	if err := proxy.Serve(cmd, filepath.Join(dir, "output"), 20*time.Second, listens); err != nil {
		t.Fatalf("nginx does not listen (make setup installs it): %w", err)
	}

	// The memory of nginx without connections does not count.
	before := mostMemory(proxy.PID())
	s.url = "https://" + listen
	s.roots = cert.File
	f := t.simulate(s, append([]string{"--pid", strconv.Itoa(proxy.PID())}, args...)...)
	f["nginx_rss_kb_each"] = (mostMemory(proxy.PID()) - before) / subscribers / 1e3

	return f
}
