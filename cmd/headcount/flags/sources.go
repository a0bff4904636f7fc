package flags

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"headcount/internal/setting"
)

// configFlag is the flag of the file of settings. It is the first flag of the commands that have it.
const configFlag = "config"

const maxFile = 1 << 20 // bytes; a longer file cannot be settings

// fill sets the values of a command's flags: from the command line, else from the environment variable,
// else from the file, else the default. An empty variable counts as not set, because compose files and
// charts often leave variables empty.
func (s *Set) fill(c *Command) (err error) {
	var file map[string]any
	for _, f := range c.Flags {
		// Until the file is read, file is nil and has no values.
		s.assign(f, file[fold(f.Name)])
		for _, value := range f.values {
			if problem := f.read(value); problem != "" {
				return setting.Errorf(f.Name, "%s", problem)
			}
		}

		// The flag of the file comes first, so all others can be in the file.
		path, is := f.target.(*string)
		if is && f.Name == configFlag && *path != "" {
			file, err = c.readFile(*path)
			if err != nil {
				return err
			}
		}
	}

	return nil
}

// assign gives a flag that is not on the command line the values of its other sources.
func (s *Set) assign(f *Flag, inFile any) {
	if len(f.values) > 0 {
		return
	}

	variable := s.Variables[s.variable(f.Name)]
	if f.private {
		variable = ""
	}

	switch {
	case variable != "":
		f.source = s.variable(f.Name)
		f.values = f.parts(variable)
	case inFile != nil:
		f.source = "the file of --config"
		f.values = []any{inFile}
	case f.otherwise != "":
		f.values = []any{f.otherwise}
	}
}

// parts returns the values in a variable.
func (f *Flag) parts(variable string) (values []any) {
	switch f.kind {
	case "each":
		// A variable is one string, so its values are separated; on the command line and in a file each stands alone.
		for _, value := range splitList(variable) {
			values = append(values, value)
		}
		return values
	case "secret":
		return []any{variable}
	default:
		// Files and commands of which variables are made often end with a newline, which no value has.
		return []any{strings.TrimSpace(variable)}
	}
}

// variable returns the name of a flag's environment variable.
func (s *Set) variable(flag string) string {
	return strings.ToUpper(strings.ReplaceAll(s.Name+"-"+flag, "-", "_"))
}

// located adds the source of a refused setting to the error, unless the source is the command line.
func (c *Command) located(err error) error {
	var refused *setting.Error
	if !errors.As(err, &refused) {
		return err
	}

	f := c.flag(refused.Name)
	if f != nil && f.source != "" {
		return fmt.Errorf("--%s (from %s): %s", f.Name, f.source, refused.Problem)
	}

	return refused
}

// readFile returns the settings in a file, by their folded names.
func (c *Command) readFile(path string) (map[string]any, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, setting.Errorf(configFlag, "%v; name a file that can be read", err)
	}

	values, err := c.parseFile(setting.WithoutMark(data))
	if err != nil {
		return nil, setting.Errorf(configFlag, "%s: %v", path, err)
	}

	return values, nil
}

// parseFile reads a JSON object member by member, because the JSON package would silently take the last
// of two equal keys.
func (c *Command) parseFile(data []byte) (map[string]any, error) {
	if len(data) > maxFile {
		return nil, errors.New("the file is larger than 1 MiB; write settings only")
	}

	var object map[string]json.RawMessage
	err := json.Unmarshal(data, &object)
	// The type error of package json names Go types, which mean nothing to the writer of the file.
	if errors.As(err, new(*json.UnmarshalTypeError)) || err == nil && object == nil {
		err = errors.New("the file is not a JSON object")
	}

	if err != nil {
		return nil, fmt.Errorf("%w; write one JSON object of settings", err)
	}

	// The text is valid JSON by now, so the tokens below need no checks of their own.
	dec := json.NewDecoder(bytes.NewReader(data))
	// A float64 would change large numbers.
	dec.UseNumber()
	_, err = dec.Token() // the brace
	values := map[string]any{}
	for err == nil && dec.More() {
		token, _ := dec.Token()
		key, _ := token.(string)

		name := fold(key)
		_, twice := values[name]

		known := slices.ContainsFunc(c.Flags, func(f *Flag) bool { return f.isKey(name) })
		if !known || strings.HasPrefix(key, "-") {
			return nil, fmt.Errorf("unknown key %q; use a flag's name without its leading dashes, "+
				"such as \"update-interval\"", key)
		}
		if twice {
			return nil, fmt.Errorf("key %q is given twice; keep one", key)
		}

		var value any
		err = dec.Decode(&value)
		values[name] = value
	}

	return values, err
}

// isKey reports whether a file may have the flag under this folded name.
func (f *Flag) isKey(name string) bool {
	return f.Name != configFlag && !f.isMode() && fold(f.Name) == name
}

// ofKubernetes matches the variables that Kubernetes sets for a Service.
var ofKubernetes = regexp.MustCompile(`_SERVICE_HOST$|_SERVICE_PORT|_PORT$|_PORT_`)

// Strangers returns the variables that begin like settings but are not, without those that Kubernetes sets
// for a Service of this name. Its error names a variable that is probably a misspelt setting.
func (s *Set) Strangers() (names []string, err error) {
	// Sorted, so that of several mistakes the same one is reported each time.
	for _, name := range slices.Sorted(maps.Keys(s.Variables)) {
		rest, ours := strings.CutPrefix(name, s.variable(""))
		// Compose files leave variables empty for settings that are not used.
		if !ours || s.Variables[name] == "" {
			continue
		}

		flag := strings.ToLower(strings.ReplaceAll(rest, "_", "-"))
		near := s.implied.nearest(flag)
		switch {
		// Of any command: one environment may serve several.
		case s.knows(flag):
		case ofKubernetes.MatchString(name):
		case near != "":
			return nil, fmt.Errorf("%s is not the variable of any setting; write %s, or remove it",
				name, s.variable(near))
		default:
			names = append(names, name)
		}
	}

	return names, nil
}

// fold makes update-interval, update_interval, updateInterval and
// updateinterval one name.
func fold(name string) string { return strings.ToLower(separators.Replace(name)) }

var separators = strings.NewReplacer("-", "", "_", "")
