package flags

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

const (
	width   = 80 // of the help, in characters
	maxLeft = 36 // of the column of flags
)

// help returns the help of a command; nil: of the program.
func (s *Set) help(c *Command) string {
	var b strings.Builder
	always := [][2]string{{"-h, --help", "Show this help."}, {"    --version", "Print the version."}}
	if c == nil {
		fmt.Fprintf(&b, "Usage: %s <command> [flags]\n\n%s\n\nFlags:\n", s.Name, wrapped(s.Description, ""))
		columns(&b, always)
		b.WriteString("\nCommands:\n")
		for _, c := range s.Commands {
			if !c.hidden {
				fmt.Fprintf(&b, "  %s [flags]\n    %s\n\n", c.Name, wrapped(c.help, "    "))
			}
		}
		fmt.Fprintf(&b, "Run \"%s <command> --help\" for more information on a command.\n", s.Name)
	} else {
		fmt.Fprintf(&b, "Usage: %s %s [flags]\n\n%s\n", s.Name, c.Name, wrapped(c.help, ""))
		if t, is := c.target.(interface{ Help() string }); is {
			fmt.Fprintf(&b, "\n%s\n", wrapped(t.Help(), ""))
		}
		b.WriteString("\nFlags:\n")
		columns(&b, append(always, c.list("", "    ")...))
		for _, g := range s.Groups {
			if rows := c.list(g.Key, ""); len(rows) > 0 {
				fmt.Fprintf(&b, "\n%s\n", g.Title)
				columns(&b, rows)
			}
		}
	}
	return b.String()
}

// list returns a row for each flag of a group: the flag with its placeholder, and its description.
func (c *Command) list(group, indent string) (rows [][2]string) {
	for _, f := range c.Flags {
		if f.group != group || f.hidden {
			continue
		}
		left, text := indent+"--"+f.Name, f.help
		if !f.isBool() {
			left += "=" + cmp.Or(f.placeholder, f.otherwise)
			if f.kind == "" && reflect.TypeOf(f.target).Elem().Kind() == reflect.Slice {
				left += ",..."
			}
		}
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
		if n := utf8.RuneCountInString(r[0]); n <= maxLeft {
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
	for i, paragraph := range strings.Split(text, "\n") {
		if i > 0 {
			b.WriteByte('\n')
		}
		at := len(indent)
		for j, word := range strings.Fields(paragraph) {
			n := utf8.RuneCountInString(word)
			switch {
			case j == 0:
			case at+1+n > width:
				b.WriteString("\n" + indent)
				at = len(indent)
			default:
				b.WriteByte(' ')
				at++
			}
			b.WriteString(word)
			at += n
		}
	}
	return b.String()
}
