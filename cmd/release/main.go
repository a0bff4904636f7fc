// Command release builds the files of a release: for each system an archive with the program and a list of the modules
// in it (an SBOM in CycloneDX), for Linux also deb and rpm packages, and the checksums of all. The same source and
// version give the same bytes.
//
//	go run ./cmd/release -version v1.2.3
//
// A container image needs only the licenses of the modules in its program:
//
//	go run ./cmd/release -licenses bin/headcount >THIRD-PARTY-LICENSES
package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// beside are the files and folders that go into each archive with the program: everything that its README.md links to.
// Tests in the folders are left out.
var beside = []string{
	"LICENSE", "README.md", "CHANGELOG.md", "ARCHITECTURE.md", "BENCHMARKS.md", "CAPACITY.md", "CONTRIBUTING.md",
	"SECURITY.md",
	"docs", "deploy", "web/README.md", "web/demo.png",
}

func main() {
	version := flag.String("version", "", "the version, such as v1.2.3")
	systems := flag.String("systems", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64", "what to build for")
	out := flag.String("out", "dist", "the directory for the archives")
	program := flag.String("licenses", "",
		"print the licenses of the modules in this program of the machine's system, and do nothing else")
	flag.Parse()

	if *program != "" {
		if err := printLicenses(os.Stdout, *program); err != nil {
			fmt.Fprintln(os.Stderr, "release:", err)
			os.Exit(1)
		}
		return
	}

	if err := release(*version, strings.Split(*systems, ","), *out, compile); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// released matches versions that dpkg and rpm sort as releases. The version that git describe makes of a commit after a
// tag, such as v1.2.3-5-gd33c79e, would sort before v1.2.3.
var released = regexp.MustCompile(`^v\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?$`)

// release builds a release in the directory out. It must run in the root of the repository.
func release(version string, systems []string, out string, build builder) error {
	if !released.MatchString(version) || strings.HasSuffix(version, "-dirty") {
		return fmt.Errorf("%q is no version of a release, so packages would not sort by it; "+
			"give one such as v1.2.3 or v1.2.3-rc.1: make release VERSION=v1.2.3", version)
	}

	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}

	var made []string
	for _, system := range systems {
		files, err := pack(version, system, out, build)
		if err != nil {
			return fmt.Errorf("%s: %w", system, err)
		}
		made = append(made, files...)
	}

	var sums strings.Builder
	for _, name := range made {
		text, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			return err
		}
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(text), name)
	}

	return os.WriteFile(filepath.Join(out, "SHA256SUMS"), []byte(sums.String()), 0o644)
}

// builder builds the program of a version for a system, and writes it to path.
type builder func(version, goos, arch, path string) error

// compile is the builder of releases.
func compile(version, goos, arch, path string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-tags", "nomsgpack",
		"-ldflags", "-s -w -X main.version="+version, "-o", path, "./cmd/headcount")
	// Without cgo the program runs on every distribution, whatever its libc.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+arch)
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// pack makes the archive, the SBOM and the packages of one system, and returns their names.
func pack(version, system, out string, build builder) ([]string, error) {
	goos, arch, ok := strings.Cut(system, "/")
	if !ok {
		return nil, fmt.Errorf("it is no system: write one such as linux/amd64")
	}

	// Intermediate files must not be in out, whose files people download.
	scratch, err := os.MkdirTemp("", "release-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)

	program := filepath.Join(scratch, "headcount")
	if err := build(version, goos, arch, program); err != nil {
		return nil, fmt.Errorf("go build: %w", err)
	}

	// The modules are read from the program, because go.mod also lists those that the linker has left out.
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, err
	}

	modules, err := licensesOf(info, goos, arch)
	if err != nil {
		return nil, err
	}

	licenses := filepath.Join(scratch, licensesFile)
	if err := os.WriteFile(licenses, notices(modules), 0o644); err != nil {
		return nil, err
	}

	name := fmt.Sprintf("headcount_%s_%s_%s", version, goos, arch)
	if err := archive(filepath.Join(out, name+".tar.gz"), name, program, licenses); err != nil {
		return nil, err
	}

	text, err := json.MarshalIndent(bom(version, modules), "", "  ")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(out, name+".cdx.json"), append(text, '\n'), 0o644); err != nil {
		return nil, err
	}

	made := []string{name + ".tar.gz", name + ".cdx.json"}
	if goos != "linux" {
		return made, nil
	}

	packages, err := packagesOf(version, arch, scratch, filepath.Join(out, name))

	return append(made, packages...), err
}

// packagesOf makes the packages for Linux from the files in scratch, and returns their names. path is their path
// without the extension.
func packagesOf(version, arch, scratch, path string) (made []string, err error) {
	// The time of the commit and not now, so that two builds give the same bytes.
	date, err := committed()
	if err != nil {
		return nil, err
	}
	if err := forDebian(version, date, scratch); err != nil {
		return nil, err
	}

	for _, kind := range []string{"deb", "rpm"} {
		if err := nfpm(version, arch, date, scratch, kind, path+"."+kind); err != nil {
			return nil, fmt.Errorf("nfpm %s: %w", kind, err)
		}
		made = append(made, filepath.Base(path)+"."+kind)
	}

	return made, nil
}

// committed returns the time of the last commit, which the files in packages have.
func committed() (time.Time, error) {
	out, err := exec.Command("git", "log", "-1", "--format=%ct").Output()
	if err != nil {
		return time.Time{}, fmt.Errorf("git log: %w", err)
	}

	seconds, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)

	return time.Unix(seconds, 0).UTC(), err
}

// forDebian writes to a folder the files that only packages have: the changelog and the manual, as Debian wants them.
func forDebian(version string, date time.Time, folder string) error {
	const changelog = `headcount (%s) stable; urgency=medium

  * The changes are in /usr/share/doc/headcount/CHANGELOG.md.

 -- Headcount maintainers <maintainers@headcount.invalid>  %s
`
	// Debian sorts ~ before the end of a version, so 1.2.3~rc.1 comes before 1.2.3.
	number := strings.Replace(strings.TrimPrefix(version, "v"), "-", "~", 1)
	text := fmt.Appendf(nil, changelog, number, date.Format(time.RFC1123Z))
	if err := compress(filepath.Join(folder, "changelog.gz"), text); err != nil {
		return err
	}

	manual, err := os.ReadFile("deploy/headcount.8")
	if err != nil {
		return err
	}

	return compress(filepath.Join(folder, "headcount.8.gz"), manual)
}

func compress(path string, text []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()

	packed, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := packed.Write(text); err != nil {
		return err
	}

	return errors.Join(packed.Close(), f.Close())
}

// nfpm makes a package of a kind, deb or rpm, from the files in the folder built, as deploy/nfpm.yaml says. It runs
// nfpm as a program of a pinned version, because the library would add dozens of modules to go.mod.
func nfpm(version, arch string, date time.Time, built, kind, path string) error {
	cmd := exec.Command("go", "run", "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2",
		"package", "--config", "deploy/nfpm.yaml", "--packager", kind, "--target", path)
	cmd.Env = append(os.Environ(),
		"VERSION="+version, "ARCH="+arch, "BUILT="+built, fmt.Sprint("SOURCE_DATE_EPOCH=", date.Unix()))
	cmd.Stderr = os.Stderr

	return cmd.Run()
}

// archive writes the program, the licenses and the files of beside into a folder of the archive.
func archive(path, folder, program, licenses string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}

	packed, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}

	t := tar.NewWriter(packed)
	if err := add(t, program, folder+"/headcount", 0o755); err != nil {
		return err
	}
	if err := add(t, licenses, folder+"/"+licensesFile, 0o644); err != nil {
		return err
	}

	for _, root := range beside {
		err := filepath.WalkDir(root, func(path string, file fs.DirEntry, err error) error {
			// Folders are created by their files.
			if err != nil || file.IsDir() || strings.HasSuffix(path, "_test.go") {
				return err
			}

			// The mode follows from the name, because that of the file differs between checkouts.
			mode := int64(0o644)
			if strings.HasSuffix(path, ".sh") {
				mode = 0o755
			}

			return add(t, path, folder+"/"+filepath.ToSlash(path), mode)
		})
		if err != nil {
			return err
		}
	}

	// The innermost first. After an error the archive lacks its end.
	for _, c := range []io.Closer{t, packed, f} {
		if err := c.Close(); err != nil {
			return err
		}
	}

	return nil
}

func add(t *tar.Writer, file, name string, mode int64) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	header := &tar.Header{
		Name:    name,
		Mode:    mode,
		Size:    int64(len(text)),
		ModTime: time.Unix(0, 0), // so that every build gives the same bytes
		Format:  tar.FormatPAX,
	}
	if err := t.WriteHeader(header); err != nil {
		return err
	}

	_, err = t.Write(text)
	return err
}

// component is a component in CycloneDX.
type component struct {
	Type     string    `json:"type"`
	Name     string    `json:"name"`
	Version  string    `json:"version"`
	Licenses []license `json:"licenses"`
	PURL     string    `json:"purl"`
}

// license is a license in CycloneDX.
type license struct {
	License struct {
		ID string `json:"id"` // of SPDX
	} `json:"license"`
}

func licensesBy(ids ...string) []license {
	all := make([]license, len(ids))
	for i, id := range ids {
		all[i].License.ID = id
	}

	return all
}

// document is an SBOM in CycloneDX 1.5.
type document struct {
	Format      string `json:"bomFormat"`
	SpecVersion string `json:"specVersion"`
	Version     int    `json:"version"`
	Metadata    struct {
		Component component `json:"component"`
	} `json:"metadata"`
	Components []component `json:"components"`
}

// bom returns the SBOM of the program with these modules.
func bom(version string, modules []licensed) document {
	d := document{Format: "CycloneDX", SpecVersion: "1.5", Version: 1}
	d.Metadata.Component = component{
		"application", "headcount", version, licensesBy("MIT"), "pkg:golang/headcount@" + version,
	}
	for _, m := range modules {
		d.Components = append(d.Components, component{"library", m.path, m.version, licensesBy(m.ids...), m.purl()})
	}

	return d
}
