package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"headcount/internal/servertest"
)

// benchProgram is the program, built without the race detector.
func benchProgram(b *testing.B) string {
	b.Helper()
	bin := filepath.Join(b.TempDir(), "headcount")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		b.Fatalf("go build: %v\n%s", err, out)
	}

	return bin
}

// process is one server process.
type process struct {
	servertest.Process
	url, admin string
}

// benchProcess starts one server process.
func benchProcess(b *testing.B, bin string, flags ...string) *process {
	b.Helper()
	public, admin := servertest.FreeAddr(), servertest.FreeAddr()
	flags = append([]string{"serve", "--listen", public, "--admin-listen", admin, "--log-level", "error"}, flags...)
	cmd := exec.Command(bin, flags...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	p := &process{url: "http://" + public, admin: admin}
	if err := p.Start(cmd); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Kill)

	return p
}

// ready waits until the process is ready.
func (p *process) ready(b *testing.B, within time.Duration) {
	b.Helper()
	if err := servertest.Await(&p.Process, within, func(ctx context.Context) error {
		return servertest.Ready(ctx, p.admin)
	}); err != nil {
		b.Fatalf("the server is not ready: %v", err)
	}
}
