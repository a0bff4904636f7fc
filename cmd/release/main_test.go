package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// A release has a program that runs, the files that belong to it, a list of its modules, installable packages, and
// correct checksums. The program is the one of the other tests: a build as for a release would compile everything anew.
func TestServerRelease(t *testing.T) {
	t.Chdir("../..")
	out := t.TempDir()

	build := func(_, _, _, path string) error {
		bin, err := testkit.Program(t.TempDir())
		if err != nil {
			return err
		}
		text, err := os.ReadFile(bin)
		if err != nil {
			return err
		}
		return os.WriteFile(path, text, 0o700)
	}

	if err := release("v1.2.3", []string{runtime.GOOS + "/" + runtime.GOARCH}, out, build); err != nil {
		t.Fatal(err)
	}

	name := fmt.Sprintf("headcount_v1.2.3_%s_%s", runtime.GOOS, runtime.GOARCH)
	sums, err := os.ReadFile(filepath.Join(out, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}

	assets := []string{name + ".tar.gz", name + ".cdx.json"}
	if runtime.GOOS == "linux" {
		assets = append(assets, name+".deb", name+".rpm")
		t.Run("deb", func(t *testing.T) { testDeb(t, filepath.Join(out, name+".deb")) })
	}

	for _, file := range assets {
		text, err := os.ReadFile(filepath.Join(out, file))
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%x  %s\n", sha256.Sum256(text), file); !strings.Contains(string(sums), want) {
			t.Errorf("the checksums lack %q:\n%s", want, sums)
		}
	}

	// The archive has the program, which the test keeps for later, and no sources.
	f, err := os.Open(filepath.Join(out, name+".tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	packed, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}

	files := map[string]int64{}
	for r := tar.NewReader(packed); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}

		file, _ := strings.CutPrefix(h.Name, name+"/")
		files[file] = h.Size
		if file != "headcount" {
			continue
		}

		program, err := os.OpenFile(filepath.Join(out, "headcount"), os.O_CREATE|os.O_WRONLY, os.FileMode(h.Mode))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(program, r); err != nil {
			t.Fatal(err)
		}
		if err := program.Close(); err != nil {
			t.Fatal(err)
		}
	}

	// The archive has every file to which its documents link.
	for _, page := range []string{"README.md", "docs/http.md", "deploy/README.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		links := regexp.MustCompile(`\]\(([^):#]+)[)#]`).FindAllStringSubmatch(string(text), -1)
		for _, link := range append(links, []string{"", filepath.Base(page)}) {
			if file := filepath.Join(filepath.Dir(page), link[1]); files[file] == 0 && !folder(files, file) {
				t.Errorf("the archive lacks %s, to which %s links", file, page)
			}
		}
	}

	for file := range files {
		if strings.HasSuffix(file, ".go") {
			t.Errorf("the archive has the source %s", file)
		}
	}

	if files["LICENSE"] == 0 || files[licensesFile] == 0 {
		t.Error("the archive lacks the license, or those of the modules")
	}

	said, err := exec.Command(filepath.Join(out, "headcount"), "version").Output()
	if err != nil || !strings.HasPrefix(string(said), "headcount ") {
		t.Errorf("the program prints %q, %v", said, err)
	}

	// The list of modules has versions and licenses.
	text, err := os.ReadFile(filepath.Join(out, name+".cdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d document
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}

	found := false
	for _, c := range d.Components {
		found = found || c.Name == "github.com/redis/go-redis/v9" &&
			strings.HasPrefix(c.PURL, "pkg:golang/github.com/redis/go-redis/v9@v9.")
		if c.Version == "" || len(c.Licenses) == 0 {
			t.Errorf("%s has no version or no license", c.Name)
		}
	}

	if !found || d.Format != "CycloneDX" {
		t.Errorf("the modules are %s", text)
	}

	// The linker omits methods that are never called, unless some code calls methods whose names are known only at run
	// time. Then the program gets 50 % larger.
	program, err := os.ReadFile(filepath.Join(out, "headcount"))
	if err != nil {
		t.Fatal(err)
	}

	const of = "github.com/redis/go-redis/v9.(*Client)."
	if !bytes.Contains(program, []byte(of+"Pipeline")) {
		t.Fatalf("the program has no %sPipeline: does it name its functions in another way?", of)
	}

	if bytes.Contains(program, []byte(of+"GeoAdd")) {
		t.Errorf("the program has %sGeoAdd, which is never called: find the caller of reflect.Value.MethodByName "+
			"(text/template, html/template, a library?) with go build -ldflags=-dumpdep", of)
	}
}

// testDeb acts like an operator in a bare root directory: install, edit the settings, upgrade, run the unit's command,
// remove, purge. There dpkg runs the package's scripts in the environment of this test, in which they must do nothing.
func testDeb(t *testing.T, deb string) {
	root := t.TempDir()
	in := func(path string) string { return filepath.Join(root, path) }

	for _, dir := range []string{"info", "updates"} {
		if err := os.MkdirAll(in("var/lib/dpkg/"+dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, in("var/lib/dpkg/status"), nil)

	dpkg := func(args ...string) {
		t.Helper()
		cmd := exec.Command("dpkg", append([]string{
			"--root=" + root, "--log=" + in("dpkg.log"), "--force-script-chrootless", "--force-not-root",
			"--force-bad-path",
		}, args...)...)
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("dpkg %v: %v\n%s", args, err, said)
		}
	}

	const (
		program      = "usr/bin/headcount"
		unitFile     = "usr/lib/systemd/system/headcount.service"
		settingsFile = "etc/headcount.json"
	)

	// The first installation.
	dpkg("--install", deb)
	for file, want := range map[string]fs.FileMode{program: 0o755, unitFile: 0o644, settingsFile: 0o600} {
		if info, err := os.Stat(in(file)); err != nil || info.Mode() != want {
			t.Fatalf("%s: %v, want mode %o", file, cmp.Or(err, fmt.Errorf("%v", info)), want)
		}
	}

	// Distributions require the licenses in the package.
	doc := func(file string) string { return string(read(t, in("usr/share/doc/headcount/"+file))) }
	if !strings.Contains(doc(licensesFile), "Mozilla Public License, version 2.0") ||
		!strings.HasPrefix(doc("CHANGELOG.md"), "# Changelog") {
		t.Error("the package lacks licenses or changes")
	}

	// An upgrade must not replace the operator's settings.
	settings := map[string]string{}
	if err := json.Unmarshal(read(t, in(settingsFile)), &settings); err != nil {
		t.Fatal(err)
	}
	listen, admin := servertest.FreeAddr(), servertest.FreeAddr()
	data := in(settings["data-dir"])
	settings["listen"], settings["admin-listen"] = listen, admin
	settings["data-dir"] = data

	edited, err := json.Marshal(settings)
	if err != nil {
		t.Fatal(err)
	}
	write(t, in(settingsFile), edited)

	dpkg("--install", deb)
	if got := read(t, in(settingsFile)); !bytes.Equal(got, edited) {
		t.Fatalf("after an upgrade the settings are %s, want %s", got, edited)
	}

	// The unit starts the installed program, as systemd would.
	unit := map[string]string{}
	for line := range strings.Lines(string(read(t, in(unitFile)))) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		unit[name] = value
	}

	credential, source, _ := strings.Cut(unit["LoadCredential"], ":")
	credentials := t.TempDir()
	write(t, filepath.Join(credentials, credential), read(t, in(source)))
	if err := os.MkdirAll(in("var/lib/"+unit["StateDirectory"]), 0o700); err != nil {
		t.Fatal(err)
	}

	args := strings.Fields(strings.ReplaceAll(unit["ExecStart"], "${CREDENTIALS_DIRECTORY}", credentials))
	cmd := exec.Command(in(args[0]), args[1:]...)
	cmd.Env = testkit.Environ()
	var server servertest.Process
	t.Cleanup(server.Kill)

	ready := func(ctx context.Context) error { return servertest.Ready(ctx, admin) }
	if err := server.Serve(cmd, in("log"), testkit.Timeout, ready); err != nil {
		t.Fatal(err)
	}

	// The installed server works.
	put, err := http.NewRequest(http.MethodPut, "http://"+listen+"/demo/counter",
		strings.NewReader(`{"action":"increment"}`))
	if err != nil {
		t.Fatal(err)
	}

	put.Close = true
	resp, err := http.DefaultClient.Do(put)
	if err != nil {
		t.Fatal(err)
	}

	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(body), `"count":1`) {
		t.Errorf("the count is %s %s, %v", resp.Status, body, err)
	}

	if status := server.End(testkit.Timeout); status != 0 {
		t.Errorf("the server ended with status %d:\n%s", status, read(t, in("log")))
	}

	exist := func(want bool, files ...string) {
		t.Helper()
		for _, file := range files {
			if _, err := os.Stat(file); (err == nil) != want {
				t.Errorf("%s: %v; want it there: %t", file, err, want)
			}
		}
	}

	// Only the purge removes the settings, and nothing removes the data.
	database := filepath.Join(data, "headcount.db")
	dpkg("--remove", "headcount")
	exist(false, in(program), in(unitFile))
	exist(true, in(settingsFile), database)

	dpkg("--purge", "headcount")
	exist(false, in(settingsFile))
	exist(true, database)
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	return text
}

func write(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestNoRelease(t *testing.T) {
	for _, version := range []string{
		"", "a/b", "1.2.3", "v1", "v1.2", "v1.2.3.4", "v1.2.3 ", "v1.2.3/4", "v1.2.3+4",
		"88e8b53", "88e8b53-dirty", "v1.2.3-dirty",
		"v1.2.3-5-gd33c79e", "v1.2.3-5-gd33c79e-dirty", "v1.2.3-rc.1-5-gd33c79e",
	} {
		err := release(version, nil, t.TempDir(), nil)
		if err == nil || !strings.Contains(err.Error(), "VERSION=v1.2.3") {
			t.Errorf("%q is accepted as a version: %v", version, err)
		}
	}

	for _, version := range []string{"v1.2.3", "v10.20.30", "v1.2.3-rc.1", "v1.2.3-beta2"} {
		if err := release(version, nil, t.TempDir(), nil); err != nil {
			t.Error(err)
		}
	}

	if release("v1.2.3", []string{"linux"}, t.TempDir(), nil) == nil {
		t.Error("linux alone is accepted as a system")
	}
}

// folder reports whether path is a folder of files.
func folder(files map[string]int64, path string) bool {
	for file := range files {
		if strings.HasPrefix(file, path+"/") {
			return true
		}
	}

	return false
}
