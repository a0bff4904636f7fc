//go:build !linux

package faults

import "os/exec"

func live(cmd *exec.Cmd, started chan<- error) { startAndWait(cmd, started) }
