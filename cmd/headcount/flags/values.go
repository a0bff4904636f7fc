package flags

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
)

// kinds are the values of the type tag, which restricts the values of a field:
//
//	text             a string that is not empty
//	secret           the same, of a variable with the white space around it, which may be a part of it
//	number           a whole number from 0
//	span, span-or-0  a positive duration, or also 0
//	days, days-or-0  the same, in which d stands for 24 h
//	list             strings, split at commas in every source; empty strings are left out
//	each             one string for each time the flag is given; only a variable is split at commas, so that
//	                 a secret may have a comma on the command line and in a file
//	switch           true or false, of a flag that may also be given without a value
//	sites            name=origin,origin for each time the flag is given; a value may have several, separated by commas
var kinds = []string{
	"", "text", "secret", "number", "span", "span-or-0", "days", "days-or-0", "list", "each", "switch", "sites",
}

// read sets the field to a value. The value is a string or, from a file, any JSON value. The problem that
// read returns never repeats the value, because it may be a secret.
func (f *Flag) read(value any) (problem string) {
	text, isText := value.(string)
	var err error
	switch target := f.target.(type) {
	case *string:
		*target = text
		if !isText {
			return "it is not a string; write it in quotes"
		}
		if text == "" && (f.kind == "text" || f.kind == "secret") {
			return "it is empty; give a value, or leave it out"
		}
	case *[]string:
		return f.readList(value, target)
	case *time.Duration:
		*target, problem = f.duration(value)
		return problem
	case **time.Duration: // nil: it was not given
		*target = new(time.Duration)
		**target, problem = f.duration(value)
		return problem
	case *int:
		*target, err = strconv.Atoi(fmt.Sprint(value))
		if err == nil && *target < 0 && f.kind == "number" {
			return fmt.Sprintf("%d is negative; give a positive number, or 0 for the default", *target)
		}
		problem = "it is not a whole number; write one such as 100"
	case *[]int:
		for part := range strings.SplitSeq(text, ",") {
			n, bad := strconv.Atoi(part)
			*target = append(*target, n)
			err = cmp.Or(err, bad)
		}
		problem = "it is not a whole number; write one such as 100"
	case *uint64:
		*target, err = strconv.ParseUint(text, 10, 64)
		problem = "it is not a whole number from 0; write one such as 100"
	case *float64:
		*target, err = strconv.ParseFloat(text, 64)
		problem = "it is not a number; write one such as 0.5"
	case *bool:
		*target, err = strconv.ParseBool(fmt.Sprint(value))
		problem = "it is neither true nor false; write one of them"
	default:
		panic(fmt.Sprintf("there is no parser for a flag of %T", target))
	}

	if err != nil {
		return problem
	}

	return ""
}

func (f *Flag) duration(value any) (d time.Duration, problem string) {
	text, isText := value.(string)
	if !isText { // a JSON number would mean nanoseconds, which is never intended
		return 0, "it is not a duration; write a string with its unit, such as \"250ms\" or \"2s\""
	}

	parse := time.ParseDuration
	kind := f.kind
	if strings.HasPrefix(kind, "days") {
		parse = counter.ParseDuration
	}

	d, err := parse(text)
	if err != nil {
		return 0, "it is not a duration; write a number with its unit, such as 250ms or 2s"
	}

	mayBeZero := strings.HasSuffix(kind, "or-0")
	if d < 0 && mayBeZero {
		return 0, fmt.Sprintf("%s is negative; give a duration such as 2s, or 0", d)
	}

	mustBePositive := kind == "span" || kind == "days"
	if d <= 0 && mustBePositive {
		return 0, fmt.Sprintf("%s is not positive; give a duration such as 2s or 250ms", d)
	}

	return d, ""
}

// readList appends to a list. A file may have several values for it.
func (f *Flag) readList(value any, list *[]string) (problem string) {
	values, several := value.([]any)
	if !several {
		values = []any{value}
	}

	for _, v := range values {
		text, isText := v.(string)
		if !isText {
			return "it is not a list of strings; write one such as [\"a\", \"b\"]"
		}
		if f.kind == "each" {
			if text == "" {
				return "one of its values is empty; give a value, or leave it out"
			}
			*list = append(*list, text)
			continue
		}

		for i, part := range splitList(text) {
			// A comma separates the origins of a site as well as sites, and only a new site has an equals sign.
			if f.kind == "sites" && i > 0 && !strings.Contains(part, "=") {
				(*list)[len(*list)-1] += "," + part
			} else if f.kind != "list" || part != "" {
				*list = append(*list, part)
			}
		}
	}

	return ""
}

// splitList splits at commas and trims spaces.
func splitList(text string) []string {
	parts := strings.Split(text, ",")
	for i, part := range parts {
		parts[i] = strings.TrimSpace(part)
	}

	return parts
}
