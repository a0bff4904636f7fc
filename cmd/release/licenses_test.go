package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// Each module of a program of ours has a known license, with its text. This test uses a program with few modules; the
// whole program is checked by TestServerRelease.
func TestServerLicenses(t *testing.T) {
	t.Chdir("../..")
	all := modulesOfHeadcount(t)
	licenses, err := licensesOf(all, runtime.GOOS, runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}

	if len(licenses) != len(all.Deps)+1 { // and the standard library
		t.Errorf("%d of %d modules have licenses", len(licenses), len(all.Deps))
	}

	text := string(notices(licenses))
	for _, want := range []string{
		"stdlib " + runtime.Version() + " (BSD-3-Clause)",
		"github.com/hashicorp/golang-lru/v2 v2.0.7 (MPL-2.0): " +
			"https://pkg.go.dev/github.com/hashicorp/golang-lru/v2@v2.0.7\n",
		"SoundCloud Ltd.", // the NOTICE of an Apache license
		"Copyright (c) 2014 HashiCorp, Inc.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the licenses lack %q", want)
		}
	}

	if strings.Contains(text, "headcount/client") {
		t.Error("our own module counts as one of others")
	}

	// A release must not contain a module without a license.
	all.Deps = append(all.Deps, &debug.Module{Path: "example.com/unknown", Version: "v1.0.0"})
	if _, err := licensesOf(all, runtime.GOOS, runtime.GOARCH); err == nil {
		t.Error("a module without a license was accepted")
	}
}

// modulesOfHeadcount returns the modules that the linker would put into the program, without linking it.
func modulesOfHeadcount(t *testing.T) *debug.BuildInfo {
	t.Helper()
	const each = `{{with .Module}}{{if not .Main}}{{if not .Replace}}{{.Path}} {{.Version}}{{end}}{{end}}{{end}}`
	out, err := exec.Command("go", "list", "-deps", "-tags", "nomsgpack", "-f", each, "./cmd/headcount").Output()
	if err != nil {
		t.Fatal(err)
	}

	info := &debug.BuildInfo{GoVersion: runtime.Version()}
	lines := strings.Fields(strings.ReplaceAll(string(out), " ", "@"))
	slices.Sort(lines)
	for _, line := range slices.Compact(lines) {
		path, version, _ := strings.Cut(line, "@")
		info.Deps = append(info.Deps, &debug.Module{Path: path, Version: version})
	}

	return info
}

func TestSPDX(t *testing.T) {
	for text, want := range map[string][]string{
		"Apache License\n   Version 2.0, January 2004": {"Apache-2.0"},
		"Redistribution and use in source and binary forms, with or without\nmodification, are " +
			"permitted": {"BSD-2-Clause"},
		"All rights reserved.":                               nil,
		"GNU GENERAL PUBLIC LICENSE Version 3, 29 June 2007": nil,
	} {
		if got := spdx([]byte(text)); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// The image contains the licenses, too.
func TestImageHasLicenses(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}

	_, final, _ := strings.Cut(string(text), "FROM scratch")
	if !strings.Contains(string(text), "./cmd/release -licenses /headcount >/"+licensesFile) ||
		!strings.Contains(final, "COPY --from=build /"+licensesFile+" /") {
		t.Error("the Dockerfile copies no " + licensesFile)
	}
}
