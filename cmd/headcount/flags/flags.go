// Package flags reads the settings of a command into a struct: from the command line, the environment
// and a file. Each field of the struct is a flag, which its tags describe. Libraries for this purpose
// call methods by names known only at run time. With such a call in a program the linker keeps every
// method of every type, which makes this program a quarter larger.
//
//	name:"url"          the flag's name; default: the field's, with dashes
//	type:"text"         the form of a value, see kinds; default: by the field's type
//	default:"100"       the value if no source has one
//	placeholder:"URL"   the name of the value in the help
//	group:"limits"      the group of the flag in the help
//	help:"…"            the description in the help
//	embed:""            the fields of this struct are flags, too, as those of an embedded struct are
//	hidden:""           the help does not show the flag
//	arg:""              the value may stand alone, without the flag
//	env:"-"             the flag has no environment variable
//	flag:"-"            the field is not a flag
//
// Commands have the tags cmd:"", help, hidden:"", and default:"" for the command that is run if none is
// named.
package flags

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"unicode"

	"headcount/internal/setting"
)

// ErrShown means that the command line asked for the help or the version, which has been written.
var ErrShown = errors.New("shown")

// Group is a part of the help.
type Group struct{ Key, Title string }

// Set is all commands of a program.
type Set struct {
	Name, Description, Version string
	Groups                     []Group
	Variables                  map[string]string // the environment
	Out                        io.Writer
	Commands                   []*Command

	implied *Command // the command that is run if none is named
}

// Command is a command of the program.
type Command struct {
	Name  string
	Flags []*Flag

	help   string
	hidden bool
	target any // points to the struct
}

// Flag is one setting of a command.
type Flag struct {
	Name string

	kind, help, group, placeholder, otherwise string
	hidden, private, alone                    bool   // private: it has no variable; alone: its value may stand alone
	target                                    any    // points to the field
	values                                    []any  // that are read into it
	source                                    string // of the values, if it is not the command line
}

// Add adds the commands of a struct, which Parse fills in.
func (s *Set) Add(commands any) {
	// Only fields are looked up, never a method by its name, which would keep every method in the program.
	all := reflect.ValueOf(commands).Elem()
	for i := range all.NumField() {
		field := all.Type().Field(i)
		if _, is := field.Tag.Lookup("cmd"); !is {
			continue
		}

		c := &Command{
			Name:   strings.ToLower(field.Name),
			help:   field.Tag.Get("help"),
			target: all.Field(i).Addr().Interface(),
		}
		_, c.hidden = field.Tag.Lookup("hidden")
		if _, implied := field.Tag.Lookup("default"); implied {
			s.implied = c
		}

		c.add(all.Field(i))
		s.Commands = append(s.Commands, c)
	}
}

// add adds the fields of a struct.
func (c *Command) add(fields reflect.Value) {
	for i := range fields.NumField() {
		field := fields.Type().Field(i)
		tag := field.Tag
		_, embedded := tag.Lookup("embed")
		if embedded || field.Anonymous {
			c.add(fields.Field(i))
			continue
		}

		if !field.IsExported() || tag.Get("flag") == "-" {
			continue
		}

		f := &Flag{
			Name:        tag.Get("name"),
			kind:        tag.Get("type"),
			help:        tag.Get("help"),
			group:       tag.Get("group"),
			placeholder: tag.Get("placeholder"),
			otherwise:   tag.Get("default"),
			target:      fields.Field(i).Addr().Interface(),
		}

		if f.Name == "" {
			f.Name = dashed(field.Name)
		}

		// A mistake of the programmer, which the first run of any command shows.
		if !slices.Contains(kinds, f.kind) {
			panic(fmt.Sprintf("--%s has the type %q, for which there is no parser", f.Name, f.kind))
		}

		_, f.hidden = tag.Lookup("hidden")
		_, f.alone = tag.Lookup("arg")
		// A mode in the environment would change every later call of the program.
		f.private = f.isMode() || tag.Get("env") == "-"

		c.Flags = append(c.Flags, f)
	}
}

// isBool reports whether the flag takes no value.
func (f *Flag) isBool() bool {
	_, is := f.target.(*bool)
	return is
}

// isMode reports whether the flag chooses a mode of one call. It is not a setting that a variable or a file could have.
func (f *Flag) isMode() bool { return f.isBool() && f.kind != "switch" }

// dashed returns the flag's name for a field: PublicURL becomes public-url.
func dashed(name string) string {
	var b strings.Builder
	runes := []rune(name)

	for i, r := range runes {
		// A row of capitals is one word, whose last letter begins the next one: JSONFile becomes json-file.
		afterLower := i > 0 && unicode.IsLower(runes[i-1])
		beforeLower := i > 0 && i+1 < len(runes) && unicode.IsLower(runes[i+1])
		if unicode.IsUpper(r) && (afterLower || beforeLower) {
			b.WriteByte('-')
		}

		b.WriteRune(unicode.ToLower(r))
	}

	return b.String()
}

// Parse reads the settings of the command named on the command line into the command's struct, and calls
// the struct's AfterApply, which may refuse them.
func (s *Set) Parse(args []string) (*Command, error) {
	c, args, named, err := s.command(args)
	if c == nil {
		return nil, explained(err, s.Name)
	}

	err = s.commandLine(c, args, named)
	if err == nil {
		err = s.fill(c)
	}

	// Only complete settings are checked, because checks compare them with each other.
	after, is := c.target.(interface{ AfterApply() error })
	if is && err == nil {
		err = after.AfterApply()
	}

	return c, c.located(explained(err, s.Name+" "+c.Name))
}

// explained adds the name of the help to an error about the command line. An error about a setting has a
// remedy of its own.
func explained(err error, command string) error {
	if err == nil || err == ErrShown { //nolint:errorlint
		return err
	}

	var s *setting.Error
	if errors.As(err, &s) {
		return err
	}

	return fmt.Errorf("%w; see %s --help", err, command)
}

// command returns the command and the arguments after it. If no command is named, it is the implied one.
func (s *Set) command(args []string) (c *Command, rest []string, named bool, err error) {
	// Cloned, because the append would write into the caller's arguments.
	if len(args) > 0 && args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}

	first := ""
	if len(args) > 0 {
		first = args[0]
	}

	switch first {
	case "-h", "--help", "help":
		return nil, nil, false, s.show(s.help(nil))
	case "--version":
		return nil, nil, false, s.show(s.Version + "\n")
	}

	// Flags without a command are those of serve, which is the default.
	if len(args) == 0 || strings.HasPrefix(first, "-") {
		return s.implied, args, false, nil
	}

	c = s.named(first)
	if c == nil {
		return nil, nil, false, s.unexpected(first)
	}

	return c, args[1:], true, nil
}

// commandLine assigns the values on the command line to the flags. It does not parse them yet, because
// --help may follow after a mistake.
func (s *Set) commandLine(c *Command, args []string, named bool) error {
	first := "" // flag
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]

		// --flag= gives an empty value, which is another thing than no value.
		name, value, hasValue := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		switch arg {
		case "-h", "--help":
			return s.show(s.help(c))
		case "--version":
			return s.show(s.Version + "\n")
		}

		// The implied command may also be named after its flags.
		if arg == c.Name && !named {
			named = true
			continue
		}

		// A lone - is a value by custom: standard input.
		if !strings.HasPrefix(arg, "-") || arg == "-" {
			alone := c.standsAlone()
			if alone == nil {
				return s.misplaced(arg, first)
			}

			alone.values = append(alone.values, arg)
			continue
		}

		f := c.flag(name)
		// A flag with one dash is refused, not guessed: -url could mean the letters u, r and l.
		if f == nil || !strings.HasPrefix(arg, "--") {
			return fmt.Errorf("unknown flag %s%s", strings.SplitN(arg, "=", 2)[0], c.suggest(name))
		}

		if f.isBool() && !hasValue {
			value = "true"
		} else if !hasValue {
			if err := s.missing(name, args); err != nil {
				return err
			}

			value = args[0]
			args = args[1:]
		}

		f.values = append(f.values, value)
		// Only the first is named: a command was most likely meant to stand before it.
		first = cmp.Or(first, name)
	}

	return nil
}

// standsAlone returns the flag whose value may stand alone, if it has none yet; or nil.
func (c *Command) standsAlone() *Flag {
	for _, f := range c.Flags {
		if f.alone && len(f.values) == 0 {
			return f
		}
	}

	return nil
}

// misplaced refuses an argument that is no flag. first is the first flag before it, or empty.
func (s *Set) misplaced(arg, first string) error {
	if first != "" && s.named(arg) != nil {
		return fmt.Errorf("the command %s comes after --%s; write the command first", arg, first)
	}

	return s.unexpected(arg)
}

// missing returns an error if the arguments after a flag do not begin with its value. A value may begin with dashes,
// but if it is the name of a flag, the value was forgotten.
func (s *Set) missing(name string, rest []string) error {
	if len(rest) == 0 {
		return setting.Errorf(name, "its value is missing; write --%s=VALUE", name)
	}

	next, _, _ := strings.Cut(rest[0], "=")
	other, dashes := strings.CutPrefix(next, "--")
	if dashes && (other == "help" || s.knows(other)) {
		return setting.Errorf(name, "its value is missing before %s; write --%s=VALUE", next, name)
	}

	return nil
}

func (s *Set) show(text string) error {
	if _, err := io.WriteString(s.Out, text); err != nil {
		return err
	}

	return ErrShown
}

// named returns the command of that name, or nil.
func (s *Set) named(name string) *Command {
	i := slices.IndexFunc(s.Commands, func(c *Command) bool { return c.Name == name })
	if i < 0 {
		return nil
	}

	return s.Commands[i]
}

// knows reports whether a command has the flag.
func (s *Set) knows(flag string) bool {
	return slices.ContainsFunc(s.Commands, func(c *Command) bool { return c.flag(flag) != nil })
}

// unexpected refuses an argument that is neither a flag nor the command.
func (s *Set) unexpected(arg string) error {
	var names []string

	for _, c := range s.Commands {
		if !c.hidden {
			names = append(names, c.Name)
		}
	}

	return fmt.Errorf("unexpected argument %s; the commands are %s", arg, strings.Join(names, ", "))
}

func (c *Command) flag(name string) *Flag {
	i := slices.IndexFunc(c.Flags, func(f *Flag) bool { return f.Name == name })
	if i < 0 {
		return nil
	}

	return c.Flags[i]
}

// nearest returns the name of the flag most similar to name, at most two letters away, or "".
func (c *Command) nearest(name string) string {
	best := ""
	// Beyond two letters a guess is more often wrong than right.
	closest := 3
	for _, f := range c.Flags {
		d := distance(name, f.Name)
		if d < closest {
			best = f.Name
			closest = d
		}
	}

	return best
}

// suggest returns a hint at the flag most similar to name, or "".
func (c *Command) suggest(name string) string {
	if best := c.nearest(name); best != "" {
		return fmt.Sprintf(`; did you mean "--%s"?`, best)
	}
	return ""
}

// distance returns the edit distance of a and b: insertions, deletions and replacements of letters.
func distance(a, b string) int {
	// One row of the table of Levenshtein is enough, since each cell needs the one above and the two beside it.
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}

	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := before
			if a[i] != b[j] {
				replaced++
			}
			before = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}

	return row[len(b)]
}
