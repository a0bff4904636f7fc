package flags

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	width   = 80 // of the help, in characters
	maxLeft = 36 // of the column of flags
)

// help returns the help of a command; nil: of the program.
func (s *Set) help(c *Command) string {
	if c == nil {
		return s.programHelp()
	}

	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s %s [flags]\n\n%s\n", s.Name, c.Name, wrapped(c.help, ""))

	if t, is := c.target.(interface{ Help() string }); is {
		fmt.Fprintf(&b, "\n%s\n", wrapped(t.Help(), ""))
	}

	b.WriteString("\nFlags:\n")
	// A clone, because always is shared by all commands.
	columns(&b, append(slices.Clone(always), c.list("", "    ")...))

	for _, g := range s.Groups {
		rows := c.list(g.Key, "")
		if len(rows) > 0 {
			fmt.Fprintf(&b, "\n%s\n", g.Title)
			columns(&b, rows)
		}
	}

	return b.String()
}

// always are the flags of every command.
var always = [][2]string{{"-h, --help", "Show this help."}, {"    --version", "Print the version."}}

// programHelp returns the help of the program.
func (s *Set) programHelp() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s <command> [flags]\n\n%s\n\nFlags:\n", s.Name, wrapped(s.Description, ""))
	columns(&b, always)

	b.WriteString("\nCommands:\n")
	for _, c := range s.Commands {
		if !c.hidden {
			fmt.Fprintf(&b, "  %s [flags]\n    %s\n\n", c.Name, wrapped(c.help, "    "))
		}
	}
	fmt.Fprintf(&b, "Run \"%s <command> --help\" for more information on a command.\n", s.Name)

	return b.String()
}

// list returns a row for each flag of a group: the flag with its placeholder, and its description.
func (c *Command) list(group, indent string) (rows [][2]string) {
	for _, f := range c.Flags {
		if f.group != group || f.hidden {
			continue
		}
		left := indent + "--" + f.Name
		// The default shows the form of a value that has no placeholder.
		if !f.isBool() {
			left += "=" + cmp.Or(f.placeholder, f.otherwise)
			if f.kind == "" && reflect.TypeOf(f.target).Elem().Kind() == reflect.Slice {
				left += ",..."
			}
		}

		text := f.help
		if f.otherwise != "" {
			text += " Default " + f.otherwise + "."
		}
		rows = append(rows, [2]string{left, text})
	}

	return rows
}

// columns writes two columns. Text that is too wide for the first column has a line of its own.
func columns(b *strings.Builder, rows [][2]string) {
	left := 0
	for _, r := range rows {
		n := utf8.RuneCountInString(r[0])
		// One very long flag must not push all descriptions to the right.
		if n <= maxLeft {
			left = max(left, n)
		}
	}

	indent := strings.Repeat(" ", left+6)
	for _, r := range rows {
		fmt.Fprintf(b, "  %-*s", left, r[0])
		if utf8.RuneCountInString(r[0]) > left {
			b.WriteString("\n" + indent[:left+2])
		}

		if r[1] != "" {
			b.WriteString("    " + wrapped(r[1], indent))
		}

		b.WriteByte('\n')
	}
}

// wrapped breaks lines at the width, and begins each new line with the indent.
func wrapped(text, indent string) string {
	var b strings.Builder
	// Line breaks of the text stay, because a description may have paragraphs.
	for i, paragraph := range strings.Split(text, "\n") {
		if i > 0 {
			b.WriteByte('\n')
		}

		at := len(indent)
		for j, word := range strings.Fields(paragraph) {
			n := utf8.RuneCountInString(word)
			// A word that is longer than a line stands alone, uncut: it may be a URL to copy.
			if j > 0 && at+1+n > width {
				b.WriteString("\n" + indent)
				at = len(indent)
			} else if j > 0 {
				b.WriteByte(' ')
				at++
			}

			b.WriteString(word)
			at += n
		}
	}

	return b.String()
}
