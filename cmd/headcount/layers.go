package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/cmd/headcount/flags"
	"headcount/counter"
	"headcount/internal/setting"
)

// layers are the environment and the file, for the flags that the command line left open. A variable
// counts before the file.
type layers struct {
	variables map[string]string // the environment
	file      map[string]any    // by folded name; nil until configFile was read
	source    map[string]string // where a flag's value comes from, if it is not the command line
}

func envName(flag string) string {
	return "HEADCOUNT_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// env is the value of the flag's variable. An empty variable counts as not set,
// because compose files and charts often leave variables empty.
func (l *layers) env(flag string) (string, bool) {
	v := l.variables[envName(flag)]
	return v, v != ""
}

// strangers returns the variables that begin as settings do and are none, without those that Kubernetes makes for
// a Service of this name. Its error names one that is probably a setting with a slip of the pen.
func (l *layers) strangers(set *flags.Set) (names []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(l.variables)) {
		rest, ours := strings.CutPrefix(name, "HEADCOUNT_")
		if !ours || l.variables[name] == "" {
			continue
		}
		flag := strings.ToLower(strings.ReplaceAll(rest, "_", "-"))
		switch near := set.Named("serve").Nearest(flag); {
		case set.Knows(flag):
		case strings.HasSuffix(name, "_SERVICE_HOST") || strings.Contains(name, "_SERVICE_PORT") || strings.HasSuffix(name, "_PORT") || strings.Contains(name, "_PORT_"):
		case near != "":
			return nil, fmt.Errorf("%s is the variable of no setting; write %s, or take it away", name, envName(near))
		default:
			names = append(names, name)
		}
	}
	return names, nil
}

func (l *layers) fromEnvironment(_ *flags.Command, f *flags.Flag) (any, error) {
	v, ok := l.env(f.Name)
	if !ok || f.Bool || f.Set() { // what is a question or a mode is no setting
		return nil, nil
	}
	if f.Name == "site" && f.Type != "sites" { // the variable has the sites of the server, and this flag names one of them
		return nil, nil
	}
	l.source[f.Name] = envName(f.Name)
	if f.Type == "each" { // the other lists split by themselves
		return splitList(v), nil
	}
	return v, nil
}

// fromFile reads the file when it is asked for the first flag.
func (l *layers) fromFile(c *flags.Command, f *flags.Flag) (any, error) {
	if l.file == nil {
		path := ""
		known := map[string]bool{}
		for _, f := range c.Flags {
			known[fold(f.Name)] = f.Name != "config" && !f.Bool
			if f.Name == "config" {
				if path = f.Given; path == "" {
					path, _ = l.env("config")
				}
			}
		}
		if path == "" {
			return nil, nil
		}
		var err error
		if l.file, err = openFile(path, known); err != nil {
			return nil, err
		}
	}
	v := l.file[fold(f.Name)]
	if v != nil && !f.Set() {
		l.source[f.Name] = "the file of --config"
	}
	return v, nil
}

// openFile returns the settings of the file by folded name.
func openFile(path string, known map[string]bool) (map[string]any, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, setting.Errorf("config", "%v; name a file that can be read", err)
	}
	defer f.Close()
	values, err := readFile(f, known)
	if err != nil {
		return nil, setting.Errorf("config", "%s: %v", path, err)
	}
	return values, nil
}

// readFile reads one JSON object of at most 1 MiB. It refuses a longer file, which
// cannot be settings. It reads token by token, because the JSON package would
// silently take the last of two equal keys.
func readFile(r io.Reader, known map[string]bool) (map[string]any, error) {
	const most = 1 << 20
	limited := &io.LimitedReader{R: r, N: most + 1}
	dec := json.NewDecoder(limited)
	dec.UseNumber()
	broken := func(err error) (map[string]any, error) {
		if limited.N <= 0 {
			return nil, errors.New("the file is larger than 1 MiB; write settings only")
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the JSON ends early")
		}
		return nil, fmt.Errorf("%w; write one JSON object of settings", err)
	}
	if t, err := dec.Token(); err != nil {
		return broken(err)
	} else if t != json.Delim('{') {
		return broken(errors.New("the file is not a JSON object"))
	}
	values := map[string]any{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return broken(err)
		}
		key, _ := t.(string) // in an object the decoder returns nothing else here
		var value any
		if err := dec.Decode(&value); err != nil {
			return broken(err)
		}
		name := fold(key)
		if !known[name] || strings.HasPrefix(key, "-") {
			return nil, fmt.Errorf("unknown key %q; use a flag's name without its leading dashes, such as \"update-interval\"", key)
		}
		if _, twice := values[name]; twice {
			return nil, fmt.Errorf("key %q is given twice; keep one", key)
		}
		values[name] = value
	}
	if _, err := dec.Token(); err != nil {
		return broken(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return broken(errors.New("something follows the JSON object"))
	}
	return values, nil
}

// fold makes update-interval, update_interval, updateInterval and
// updateinterval one name.
func fold(name string) string { return strings.ToLower(separators.Replace(name)) }

var separators = strings.NewReplacer("-", "", "_", "")

// splitList splits at commas and trims spaces. It keeps empty values: "each"
// refuses them later, and "list" drops them.
func splitList(s string) []any {
	var out []any
	for v := range strings.SplitSeq(s, ",") {
		out = append(out, strings.TrimSpace(v))
	}
	return out
}

// readers are the types of Config's tags: "text" is one string; "span" a
// positive duration, "span-or-0" also 0, "days" one in which d stands for 24 h, "days-or-0" also 0; "number" a whole number from 0; "list"
// is split at commas wherever it comes from; "sites" is one name=origin,origin for each time
// the flag is given, and in one value the next name begins the next; "each" is one value for each time
// the flag is given and split at commas in the environment only, so that a
// secret may hold a comma on the command line and in the file.
var readers = map[string]flags.Reader{
	"text": func(value any, target reflect.Value) string {
		s, ok := value.(string)
		switch {
		case !ok:
			return "it is not a string; write it in quotes"
		case s == "":
			return "it is empty; give a value, or leave it out"
		}
		target.SetString(s)
		return ""
	},
	"span":      span(time.ParseDuration, 1, "%s is not positive; give a duration such as 2s or 250ms"),
	"span-or-0": span(time.ParseDuration, 0, "%s is negative; give a duration such as 2s, or 0"),
	"days":      span(counter.ParseDuration, 1, "%s is not positive; give a duration such as 2s, 24h or 7d"),
	"days-or-0": span(counter.ParseDuration, 0, "%s is negative; give a duration such as 24h or 7d, or 0"),
	"number": func(value any, target reflect.Value) string {
		s, ok := value.(string)
		if n, isNumber := value.(json.Number); isNumber {
			s, ok = n.String(), true
		}
		n, err := strconv.Atoi(s)
		if !ok || err != nil {
			return "it is not a whole number; write one such as 10000"
		}
		if n < 0 {
			return fmt.Sprintf("%d is negative; give a positive number, or 0 for the default", n)
		}
		target.SetInt(int64(n))
		return ""
	},
	"list": func(value any, target reflect.Value) string {
		return appendAll(value, target, func(s string) string {
			for _, v := range splitList(s) {
				if v != "" {
					target.Set(reflect.Append(target, reflect.ValueOf(v)))
				}
			}
			return ""
		})
	},
	"sites": func(value any, target reflect.Value) string {
		return appendAll(value, target, func(s string) string {
			first := target.Len()
			for _, v := range splitList(s) {
				if part := v.(string); strings.Contains(part, "=") || target.Len() == first {
					target.Set(reflect.Append(target, reflect.ValueOf(part)))
				} else {
					last := target.Index(target.Len() - 1)
					last.SetString(last.String() + "," + part)
				}
			}
			return ""
		})
	},
	"each": func(value any, target reflect.Value) string {
		return appendAll(value, target, func(s string) string {
			if s == "" {
				return "one of its values is empty; give a value, or leave it out"
			}
			target.Set(reflect.Append(target, reflect.ValueOf(s)))
			return ""
		})
	},
}

// span reads a duration with parse. It refuses one under least as too short.
func span(parse func(string) (time.Duration, error), least time.Duration, tooShort string) flags.Reader {
	return func(value any, target reflect.Value) string {
		s, ok := value.(string)
		if !ok { // a JSON number would be nanoseconds, which nobody means
			return "it is not a duration; write a string with its unit, such as \"250ms\" or \"2s\""
		}
		d, err := parse(s)
		if err != nil {
			return "it is not a duration; write a number with its unit, such as 250ms or 2s"
		}
		if d < least {
			return fmt.Sprintf(tooShort, d)
		}
		if target.Kind() == reflect.Pointer { // nil: it was not given
			target.Set(reflect.New(target.Type().Elem()))
			target = target.Elem()
		}
		target.SetInt(int64(d))
		return ""
	}
}

func appendAll(value any, target reflect.Value, add func(string) (problem string)) string {
	values, ok := value.([]any)
	if !ok {
		values = []any{value}
	}
	for _, v := range values {
		s, ok := v.(string)
		if !ok {
			return "it is not a list of strings; write one such as [\"a\", \"b\"]"
		}
		if problem := add(s); problem != "" {
			return problem
		}
	}
	return ""
}
