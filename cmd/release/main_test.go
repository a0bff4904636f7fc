package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"headcount/internal/testkit"
)

// A release has a program that runs, what belongs beside it, a list of its modules, and
// right checksums. The program is that of the other tests: to build it as releases are would
// compile everything anew.
func TestRelease(t *testing.T) {
	testkit.Long(t)
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
	for _, file := range []string{name + ".tar.gz", name + ".cdx.json"} {
		text, err := os.ReadFile(filepath.Join(out, file))
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%x  %s\n", sha256.Sum256(text), file); !strings.Contains(string(sums), want) {
			t.Errorf("the checksums lack %q:\n%s", want, sums)
		}
	}

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
	for _, page := range []string{"README.md", "docs/http.md", "deploy/README.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		links := regexp.MustCompile(`\]\(([^):#]+)[)#]`).FindAllStringSubmatch(string(text), -1)
		for _, link := range append(links, []string{"", filepath.Base(page)}) {
			if file := filepath.Join(filepath.Dir(page), link[1]); files[file] == 0 && !folder(files, file) {
				t.Errorf("the archive lacks %s, to which %s leads", file, page)
			}
		}
	}
	for file := range files {
		if strings.HasSuffix(file, ".go") {
			t.Errorf("the archive has %s", file)
		}
	}
	if files["LICENSE"] == 0 {
		t.Error("the archive lacks the license")
	}
	said, err := exec.Command(filepath.Join(out, "headcount"), "version").Output()
	if err != nil || !strings.HasPrefix(string(said), "headcount ") {
		t.Errorf("the program says %q, %v", said, err)
	}

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
		found = found || c.Name == "github.com/redis/go-redis/v9" && strings.HasPrefix(c.PURL, "pkg:golang/github.com/redis/go-redis/v9@v9.")
		if c.Version == "" {
			t.Errorf("%s has no version", c.Name)
		}
	}
	if !found || d.Format != "CycloneDX" {
		t.Errorf("the modules are %s", text)
	}

	// The linker leaves out methods that nobody calls, unless something in the program calls
	// methods by names that only a run tells. Then the program is a half larger.
	program, err := os.ReadFile(filepath.Join(out, "headcount"))
	if err != nil {
		t.Fatal(err)
	}
	const of = "github.com/redis/go-redis/v9.(*Client)."
	if !bytes.Contains(program, []byte(of+"Pipeline")) {
		t.Fatalf("the program has no %sPipeline: does it name its functions in another way?", of)
	}
	if bytes.Contains(program, []byte(of+"GeoAdd")) {
		t.Errorf("the program has %sGeoAdd, which nobody calls: see who calls reflect.Value.MethodByName (text/template, html/template, a library?) with go build -ldflags=-dumpdep", of)
	}
}

func TestNoRelease(t *testing.T) {
	for _, version := range []string{"", "a/b"} {
		if release(version, nil, t.TempDir(), nil) == nil {
			t.Errorf("%q is taken for a version", version)
		}
	}
	if release("v1", []string{"linux"}, t.TempDir(), nil) == nil {
		t.Error("linux alone is taken for a system")
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
