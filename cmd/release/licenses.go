package main

import (
	"bytes"
	"cmp"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// licensesFile is the name of a file that accompanies every copy of the program. Nearly all licenses of its modules
// require that their text accompanies a binary, and the MPL also requires the address of the source.
const licensesFile = "THIRD-PARTY-LICENSES"

// licensed is a module in the program, with its license.
type licensed struct {
	path, version string
	ids           []string // of SPDX
	text          []byte   // of all its files
}

// licensesOf returns the modules in a program for a system, sorted, with their licenses. It fails when it does not know
// the license of a module, so that a person looks at it first.
func licensesOf(info *debug.BuildInfo, goos, arch string) ([]licensed, error) {
	stdlib, err := readLicense(nil, []string{filepath.Join(goroot(), "LICENSE"), filepath.Join(goroot(), "PATENTS")})
	if err != nil {
		return nil, fmt.Errorf("the standard library: %w", err)
	}

	// The standard library is in every program, but it is no module.
	all := []licensed{{"stdlib", info.GoVersion, spdx(stdlib), stdlib}}
	files, err := licenseFiles(goos, arch)
	if err != nil {
		return nil, err
	}

	for _, m := range info.Deps {
		if m.Replace != nil && strings.HasPrefix(m.Replace.Path, ".") {
			continue // a module of this repository
		}

		path := m.Path
		m = cmp.Or(m.Replace, m)
		text, err := readLicense(nil, files[path])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}

		all = append(all, licensed{m.Path, m.Version, spdx(text), text})
	}

	for _, one := range all {
		if len(one.ids) == 0 {
			return nil, fmt.Errorf("cmd/release does not know the license of %s: see whether it may be "+
				"distributed, and add it to licenses.go", one.path)
		}
	}

	return all, nil
}

// goroot returns the directory of the Go installation.
func goroot() string {
	out, _ := exec.Command("go", "env", "GOROOT").Output() // after an error its license will not be found

	return strings.TrimSpace(string(out))
}

// isLicense matches the names of files that must accompany a binary.
var isLicense = regexp.MustCompile(`(?i)^(licen[cs]e|copying|notice|patents)([.-]\w+)?$`)

// licenseFiles returns the license files of each module in the program: those in the folders of its packages, and in
// the folders above them up to the root of the module.
func licenseFiles(goos, arch string) (map[string][]string, error) {
	const each = `{{with .Module}}{{.Path}}{{"\t"}}{{.Dir}}{{"\t"}}{{$.Dir}}{{end}}`
	// The same tags as in compile, or the list would have packages that are not in the program.
	cmd := exec.Command("go", "list", "-deps", "-tags", "nomsgpack", "-f", each, "./cmd/headcount")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+arch)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}

	files := map[string][]string{}
	visited := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		module := strings.Split(strings.TrimSpace(line), "\t")
		if len(module) != 3 {
			continue // a package of the standard library
		}

		path, root := module[0], module[1]
		// Upward, because the license may be in a folder above the package. Each folder is read once.
		for dir := module[2]; !visited[dir]; dir = filepath.Dir(dir) {
			visited[dir] = true
			found, err := licensesIn(dir)
			if err != nil {
				return nil, err
			}

			files[path] = append(files[path], found...)
			if dir == root {
				break
			}
		}
	}

	return files, nil
}

func licensesIn(dir string) (files []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if !entry.IsDir() && isLicense.MatchString(entry.Name()) {
			files = append(files, filepath.Join(dir, entry.Name()))
		}
	}

	return files, err
}

// readLicense appends the texts of the files. It appends equal texts once, because some modules repeat their license in
// several folders.
func readLicense(text []byte, files []string) ([]byte, error) {
	slices.Sort(files)
	for _, file := range files {
		one, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // the Go installation may lack PATENTS
		}
		if err != nil {
			return nil, err
		}

		// Copies of one license differ in line ends and in white space around the text.
		one = append(bytes.TrimSpace(bytes.ReplaceAll(one, []byte("\r"), nil)), "\n\n"...)
		if !bytes.Contains(text, one) {
			text = append(text, one...)
		}
	}

	return text, nil
}

// phrases have, for each license, a text that identifies it. A text may have several licenses.
var phrases = []struct{ id, phrase string }{
	{"Apache-2.0", "Apache License Version 2.0"},
	{"BSD-2-Clause", "Redistribution and use in source and binary forms, with or without modification, are permitted"},
	{"BSD-3-Clause", "to endorse or promote products derived from this software without specific"},
	{"ISC", "Permission to use, copy, modify, and/or distribute this software for any purpose"},
	{"ISC", "Permission to use, copy, modify, and distribute this software for any purpose"},
	{"MIT", "Permission is hereby granted, free of charge, to any person obtaining a copy of this software"},
	{"MPL-2.0", "Mozilla Public License Version 2.0"},
	{"MPL-2.0", "Mozilla Public License, version 2.0"},
}

// spdx returns the SPDX identifiers of the licenses in a text, sorted.
func spdx(text []byte) (ids []string) {
	// Licenses are wrapped at different columns, so white space is made the same.
	words := strings.ToLower(strings.Join(strings.Fields(string(text)), " "))
	for _, p := range phrases {
		if strings.Contains(words, strings.ToLower(p.phrase)) {
			ids = append(ids, p.id)
		}
	}

	if slices.Contains(ids, "BSD-3-Clause") { // it contains the text of BSD-2-Clause
		ids = slices.DeleteFunc(ids, func(id string) bool { return id == "BSD-2-Clause" })
	}

	slices.Sort(ids)

	return slices.Compact(ids)
}

// notices returns the content of licensesFile.
func notices(modules []licensed) []byte {
	var b bytes.Buffer
	fmt.Fprint(&b, "Headcount has the MIT license, see LICENSE. The program contains the following modules of others, "+
		"unchanged.\nEach has its license below. The source of a module is at the address beside its name.\n\n")

	for _, m := range modules {
		fmt.Fprintf(&b, "%s %s (%s): %s\n", m.path, m.version, strings.Join(m.ids, ", "), m.source())
	}

	for _, m := range modules {
		fmt.Fprintf(&b, "\n%s\n%s %s\n\n%s", strings.Repeat("=", 80), m.path, m.version, m.text)
	}

	return append(bytes.TrimSpace(b.Bytes()), '\n')
}

// source returns the address of the module's source.
func (m licensed) source() string {
	if m.path == "stdlib" {
		return "https://go.dev/dl/" + m.version + ".src.tar.gz"
	}

	return "https://pkg.go.dev/" + m.path + "@" + m.version
}

// purl returns the package URL of the module, its name in an SBOM.
func (m licensed) purl() string {
	if m.path == "stdlib" {
		return "pkg:golang/std@" + strings.TrimPrefix(m.version, "go")
	}

	return "pkg:golang/" + m.path + "@" + m.version
}

// printLicenses writes the licenses of the modules in a program of this system.
func printLicenses(w io.Writer, program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}

	modules, err := licensesOf(info, runtime.GOOS, runtime.GOARCH)
	if err != nil {
		return err
	}

	_, err = w.Write(notices(modules))

	return err
}
