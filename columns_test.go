package headcount_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

const maxColumns = 120 // a tab counts for four

// measured has the endings of the sources whose lines must not be too long.
var measured = map[string]bool{".go": true, ".lua": true, ".js": true, ".ts": true, ".sh": true}

// made matches generated files: scripts of the browser client as they are served, packages of others, and the like.
var made = regexp.MustCompile(`^web/(node_modules|package)/|` +
	`^web/public/(headcount|live|bell|list|more|rescue|live-top)\.js$|^(bin|dist|\.git)/`)

// text matches a string, a template or a regular expression of JavaScript within a line. Breaking it would change the
// expression.
var text = regexp.MustCompile("" +
	"'(?:[^'\\\\]|\\\\.)*'|\"(?:[^\"\\\\]|\\\\.)*\"" +
	"|`(?:[^`\\\\]|\\\\.)*`|/\\S(?:[^/\\\\]|\\\\.)*/")

// tooLong returns the numbers of the lines with too many columns. Lines that cannot be broken are exempt: struct tags,
// and the text of literals.
func tooLong(name, source string) (lines []int) {
	exempt := map[int]bool{}
	if filepath.Ext(name) == ".go" {
		exempt = literals(name, source)
	}

	inTemplate := false
	for i, line := range strings.Split(source, "\n") {
		short := columns(line) <= maxColumns
		if isScript(name) {
			// No parser of JavaScript is at hand. An odd number of backquotes opens or closes a template, and the lines
			// on both ends count as text.
			inText := inTemplate
			if strings.Count(line, "`")%2 == 1 {
				inTemplate = !inTemplate
			}
			short = short || inText || inTemplate || columns(text.ReplaceAllString(line, "''")) <= maxColumns
		}

		if !short && !exempt[i+1] {
			lines = append(lines, i+1)
		}
	}

	return lines
}

func isScript(name string) bool {
	return strings.HasSuffix(name, ".js") || strings.HasSuffix(name, ".ts")
}

func columns(line string) int { return utf8.RuneCountInString(line) + 3*strings.Count(line, "\t") }

// literals returns the lines of a Go source that have a struct tag, and those of literals of several lines.
func literals(name, source string) map[int]bool {
	lines := map[int]bool{}
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, 0)
	if err != nil {
		return lines // the compiler reports the error
	}

	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Field:
			if n.Tag != nil {
				lines[files.Position(n.Tag.Pos()).Line] = true
			}
		case *ast.BasicLit:
			if n.Kind == token.STRING && strings.Contains(n.Value, "\n") {
				first := files.Position(n.Pos()).Line
				for i := range strings.Count(n.Value, "\n") + 1 {
					lines[first+i] = true
				}
			}
		}

		return true
	})

	return lines
}

func TestNoLineIsTooLong(t *testing.T) {
	seen := 0
	err := filepath.WalkDir(".", func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && made.MatchString(filepath.ToSlash(file)+"/") {
			return filepath.SkipDir
		}
		if d.IsDir() || !measured[filepath.Ext(file)] || made.MatchString(filepath.ToSlash(file)) {
			return nil
		}

		source, err := os.ReadFile(file)
		if err != nil {
			return err
		}

		seen++
		for _, line := range tooLong(file, string(source)) {
			t.Errorf("%s:%d has more than %d columns", file, line, maxColumns)
		}

		return nil
	})

	// Too few sources may mean that made has come to match directories of ours.
	if err != nil || seen < 500 {
		t.Fatalf("%d sources were read: %v", seen, err)
	}
}

func TestTooLongFindsLongLines(t *testing.T) {
	long := strings.Repeat("x", maxColumns)
	for name, tc := range map[string]struct {
		file, source string
		want         []int
	}{
		"just short":           {"a.go", "package a\n\n//" + long[2:], nil},
		"a comment":            {"a.go", "package a\n\n// " + long, []int{3}},
		"tabs":                 {"a.lua", strings.Repeat("\t", 30) + "x", []int{1}},
		"letters of two bytes": {"a.sh", "# " + strings.Repeat("é", maxColumns-2), nil},
		"code":                 {"a.go", "package a\n\nvar a = " + long + " + 1", []int{3}},
		"a string of a line":   {"a.go", "package a\n\nvar a = \"" + long + "\"", []int{3}},
		"a struct tag":         {"a.go", "package a\n\ntype a struct {\n\tb int `c:\"" + long + "\"`\n}", nil},
		"a text of many lines": {"a.go", "package a\n\nvar a = `\n" + long + "x\n`\n// " + long, []int{6}},
		"a template":           {"a.js", "a(`\n" + long + "x\n`);\n// " + long, []int{4}},
		"a string in a script": {"a.js", "a('" + long + "');\nb = " + long, []int{2}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tooLong(tc.file, tc.source); fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Fatalf("lines %v, want %v", got, tc.want)
			}
		})
	}
}
