// Package flags reads a command line into structs: each field of a command's struct is a flag, which
// the field's tags describe. Libraries that do this call methods by names that only a run tells, and
// with such a call in a program the linker keeps every method of every type: a quarter of this one.
//
//	name:"url"          the flag's name; default: the field's, with dashes
//	type:"text"         which Reader reads it; default: one for the field's kind
//	default:"100"       read when nothing else gives a value
//	placeholder:"URL"   stands for the value in the help
//	group:"limits"      the part of the help that has it
//	help:"…"            says what it is for
//	embed:""            of a struct: its fields are flags, too, as those of an embedded struct are
//	hidden:""           the help does not show it
//	flag:"-"            the field is no flag
//
// Of commands: cmd:"", help, hidden:"", and default:"" for the one that is meant where none is named.
package flags

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"headcount/internal/setting"
)

// ErrShown says that the command line asked for the help or the version, which was written.
var ErrShown = errors.New("shown")

// Reader turns one value into its field. The value is a string from a command line, or whatever a
// Layer has. The problem that it returns never repeats the value, because that may be a secret.
type Reader func(value any, target reflect.Value) (problem string)

// Layer has values for flags that the command line left open; nil: it has none for this one.
type Layer func(c *Command, f *Flag) (value any, err error)

// Group is a part of the help.
type Group struct{ Key, Title string }

// Set is all commands of a program.
type Set struct {
	Name, Description, Version string
	Groups                     []Group
	Readers                    map[string]Reader
	Layers                     []Layer // of two that have a value the first one counts
	Out                        io.Writer
	Commands                   []*Command
}

// Command is what a program can be asked to do.
type Command struct {
	Name  string
	Flags []*Flag

	help            string
	hidden, implied bool
	target          reflect.Value
}

// Flag is one setting of a command.
type Flag struct {
	Name, Type string
	Bool       bool   // it needs no value
	Given      string // the last value that the command line has for it

	help, group, placeholder, otherwise string
	read                                Reader
	target                              reflect.Value
	given, hidden                       bool
}

// Add adds the commands of a struct, which Parse fills in. A mistake in its tags is a panic.
func (s *Set) Add(commands any) {
	all := reflect.ValueOf(commands).Elem()
	for i := range all.NumField() {
		field := all.Type().Field(i)
		if _, is := field.Tag.Lookup("cmd"); !is {
			continue
		}
		c := &Command{Name: strings.ToLower(field.Name), help: field.Tag.Get("help"), target: all.Field(i)}
		_, c.hidden = field.Tag.Lookup("hidden")
		_, c.implied = field.Tag.Lookup("default")
		s.fields(c, c.target)
		s.Commands = append(s.Commands, c)
	}
}

func (s *Set) fields(c *Command, of reflect.Value) {
	for i := range of.NumField() {
		field := of.Type().Field(i)
		if _, tagged := field.Tag.Lookup("embed"); tagged || field.Anonymous {
			s.fields(c, of.Field(i))
			continue
		}
		if !field.IsExported() || field.Tag.Get("flag") == "-" {
			continue
		}
		f := &Flag{
			Name: field.Tag.Get("name"), Type: field.Tag.Get("type"), Bool: field.Type.Kind() == reflect.Bool, target: of.Field(i),
			help: field.Tag.Get("help"), group: field.Tag.Get("group"), placeholder: field.Tag.Get("placeholder"), otherwise: field.Tag.Get("default"),
		}
		_, f.hidden = field.Tag.Lookup("hidden")
		if f.Name == "" {
			f.Name = dashed(field.Name)
		}
		if f.read = s.Readers[f.Type]; f.Type == "" {
			f.read = plain
		}
		if f.read == nil {
			panic(fmt.Sprintf("the flag --%s has the type %q, which nobody reads", f.Name, f.Type))
		}
		c.Flags = append(c.Flags, f)
	}
}

// dashed is a field's name as a flag: PublicURL is public-url.
func dashed(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		begins := i > 0 && unicode.IsUpper(r) && (unicode.IsLower(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1]))
		if begins {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// Parse reads a command line, the layers and the defaults into the struct of a command, and has it
// checked: by the methods Validate of it and of what is embedded, and then AfterApply of it. The
// command is returned also with an error, if one was found.
func (s *Set) Parse(args []string) (*Command, error) {
	c, args, named, err := s.command(args)
	if c == nil || err != nil {
		return c, err
	}
	type given struct {
		flag  *Flag
		value string
	}
	var values []given
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, value, hasValue := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		f := c.flag(name)
		switch {
		case arg == "-h" || arg == "--help":
			s.help(c)
			return c, ErrShown
		case arg == "--version":
			return c, s.shown(s.Version)
		case arg == c.Name && !named: // what is implied may also be said behind its flags
			named = true
			continue
		case !strings.HasPrefix(arg, "-") || arg == "-":
			if len(values) > 0 && s.Named(arg) != nil {
				return c, fmt.Errorf("the command %s stands behind --%s; write the command first", arg, values[0].flag.Name)
			}
			return c, s.unexpected(arg)
		case !strings.HasPrefix(arg, "--") || f == nil:
			return c, fmt.Errorf("unknown flag %s%s", strings.SplitN(arg, "=", 2)[0], c.suggest(name))
		case hasValue:
		case f.Bool:
			value = "true"
		case len(args) == 0:
			return c, setting.Errorf(name, "its value is missing; write --%s=VALUE", name)
		default: // a secret or a negative duration may begin with dashes, the name of a flag is a forgotten value
			if next, _, _ := strings.Cut(args[0], "="); strings.HasPrefix(next, "--") && s.Knows(next[2:]) {
				return c, setting.Errorf(name, "its value is missing before %s; write --%s=VALUE", next, name)
			}
			value, args = args[0], args[1:]
		}
		f.Given, f.given = value, true
		values = append(values, given{f, value})
	}
	for _, v := range values {
		if problem := v.flag.read(v.value, v.flag.target); problem != "" {
			return c, setting.Errorf(v.flag.Name, "%s", problem)
		}
	}
	for _, f := range c.Flags {
		if err := s.fill(c, f); err != nil {
			return c, err
		}
	}
	if err := validate(c.target); err != nil {
		return c, err
	}
	if t, is := c.target.Addr().Interface().(interface{ AfterApply() error }); is {
		return c, t.AfterApply()
	}
	return c, nil
}

// command finds the command, and what follows it. If it is not named, it is implied.
func (s *Set) command(args []string) (c *Command, rest []string, named bool, err error) {
	switch {
	case len(args) > 0 && (args[0] == "-h" || args[0] == "--help"):
		s.help(nil)
		return nil, nil, false, ErrShown
	case len(args) > 0 && args[0] == "help":
		for _, arg := range args[1:] {
			switch {
			case arg == "-h" || arg == "--help" || arg == "help" && c == nil:
			case c != nil || s.Named(arg) == nil:
				return nil, nil, false, s.unexpected(arg)
			default:
				c = s.Named(arg)
			}
		}
		s.help(c)
		return nil, nil, false, ErrShown
	case len(args) > 0 && args[0] == "--version":
		return nil, nil, false, s.shown(s.Version)
	case len(args) > 0 && !strings.HasPrefix(args[0], "-"):
		if c := s.Named(args[0]); c != nil {
			return c, args[1:], true, nil
		}
		return nil, nil, false, s.unexpected(args[0])
	}
	i := slices.IndexFunc(s.Commands, func(c *Command) bool { return c.implied })
	return s.Commands[i], args, false, nil
}

func (s *Set) shown(text string) error {
	if _, err := fmt.Fprintln(s.Out, text); err != nil {
		return err
	}
	return ErrShown
}

// Named returns the command of that name, or nil.
func (s *Set) Named(name string) *Command {
	for _, c := range s.Commands {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// Knows reports whether a command has the flag.
func (s *Set) Knows(flag string) bool {
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
	for _, f := range c.Flags {
		if f.Name == name {
			return f
		}
	}
	return nil
}

// Nearest returns the name of the flag that is most like name, at most two letters away; "" when there is none.
func (c *Command) Nearest(name string) string {
	best, least := "", 3
	for _, f := range c.Flags {
		if d := distance(name, f.Name); d < least {
			best, least = f.Name, d
		}
	}
	return best
}

// suggest names the flag that is most like name, if one is much like it.
func (c *Command) suggest(name string) string {
	best := c.Nearest(name)
	if best == "" {
		return ""
	}
	return fmt.Sprintf(`; did you mean "--%s"?`, best)
}

// distance is how many letters have to be put in, taken out or replaced to get b from a.
func distance(a, b string) int {
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

// Set reports whether the flag has a value: from the command line, or from a layer.
func (f *Flag) Set() bool { return f.given }

// fill gives a flag that the command line left open its value.
func (s *Set) fill(c *Command, f *Flag) error {
	for _, layer := range s.Layers {
		value, err := layer(c, f)
		if err != nil {
			return err
		}
		if f.given || value == nil {
			continue // a layer that is broken is told of all the same
		}
		f.given = true
		if problem := f.read(value, f.target); problem != "" {
			return setting.Errorf(f.Name, "%s", problem)
		}
	}
	if f.given || f.otherwise == "" {
		return nil
	}
	if problem := f.read(f.otherwise, f.target); problem != "" {
		panic(fmt.Sprintf("the default of --%s: %s", f.Name, problem))
	}
	return nil
}

// validate has a command, and what it embeds, look at itself.
func validate(of reflect.Value) error {
	for i := range of.NumField() {
		if _, tagged := of.Type().Field(i).Tag.Lookup("embed"); tagged { // the methods of an embedded struct are those of the struct
			if err := validate(of.Field(i)); err != nil {
				return err
			}
		}
	}
	if t, is := of.Addr().Interface().(interface{ Validate() error }); is {
		return t.Validate()
	}
	return nil
}

// plain reads what has no type, by the kind of the field. A list takes one value or several,
// separated by commas, each time.
func plain(value any, target reflect.Value) string {
	text, ok := value.(string)
	if !ok {
		return "it is not a string; write it in quotes"
	}
	var err error
	switch target.Interface().(type) {
	case bool:
		var is bool
		if is, err = strconv.ParseBool(text); err != nil {
			return "it is neither true nor false"
		}
		target.SetBool(is)
	case string:
		target.SetString(text)
	case int:
		var n int64
		if n, err = strconv.ParseInt(text, 10, 0); err != nil {
			return "it is not a whole number; write one such as 100"
		}
		target.SetInt(n)
	case uint64:
		var n uint64
		if n, err = strconv.ParseUint(text, 10, 64); err != nil {
			return "it is not a whole number from 0; write one such as 100"
		}
		target.SetUint(n)
	case float64:
		var n float64
		if n, err = strconv.ParseFloat(text, 64); err != nil {
			return "it is not a number; write one such as 0.5"
		}
		target.SetFloat(n)
	case time.Duration:
		var d time.Duration
		if d, err = time.ParseDuration(text); err != nil {
			return "it is not a duration; write a number with its unit, such as 250ms or 2s"
		}
		target.SetInt(int64(d))
	case []string, []int:
		for part := range strings.SplitSeq(text, ",") {
			one := reflect.New(target.Type().Elem()).Elem()
			if problem := plain(part, one); problem != "" {
				return problem
			}
			target.Set(reflect.Append(target, one))
		}
	default:
		panic("nobody reads a flag of " + target.Type().String())
	}
	return ""
}
