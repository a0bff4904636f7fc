package api

import (
	"regexp"
	"slices"
	"strings"
)

// hexadecimal matches the digits of a colour. The # may be missing, since a query has to write it as %23.
var hexadecimal = regexp.MustCompile(`^#?(?:[0-9a-fA-F]{3,4}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})$`)

// colourNames are the named colours of CSS Color 4, and transparent, sorted.
var colourNames = strings.Fields(`
	aliceblue antiquewhite aqua aquamarine azure beige bisque black blanchedalmond blue blueviolet brown burlywood
	cadetblue chartreuse chocolate coral cornflowerblue cornsilk crimson cyan darkblue darkcyan darkgoldenrod
	darkgray darkgreen darkgrey darkkhaki darkmagenta darkolivegreen darkorange darkorchid darkred darksalmon
	darkseagreen darkslateblue darkslategray darkslategrey darkturquoise darkviolet deeppink deepskyblue dimgray
	dimgrey dodgerblue firebrick floralwhite forestgreen fuchsia gainsboro ghostwhite gold goldenrod gray green
	greenyellow grey honeydew hotpink indianred indigo ivory khaki lavender lavenderblush lawngreen lemonchiffon
	lightblue lightcoral lightcyan lightgoldenrodyellow lightgray lightgreen lightgrey lightpink lightsalmon
	lightseagreen lightskyblue lightslategray lightslategrey lightsteelblue lightyellow lime limegreen linen magenta
	maroon mediumaquamarine mediumblue mediumorchid mediumpurple mediumseagreen mediumslateblue mediumspringgreen
	mediumturquoise mediumvioletred midnightblue mintcream mistyrose moccasin navajowhite navy oldlace olive
	olivedrab orange orangered orchid palegoldenrod palegreen paleturquoise palevioletred papayawhip peachpuff peru
	pink plum powderblue purple rebeccapurple red rosybrown royalblue saddlebrown salmon sandybrown seagreen
	seashell sienna silver skyblue slateblue slategray slategrey snow springgreen steelblue tan teal thistle tomato
	transparent turquoise violet wheat white whitesmoke yellow yellowgreen
`)

// parseColour returns a colour in the form of CSS and SVG.
func parseColour(text string) (string, bool) {
	if hexadecimal.MatchString(text) {
		return "#" + strings.TrimPrefix(text, "#"), true
	}
	name := strings.ToLower(text)
	_, found := slices.BinarySearch(colourNames, name)
	return name, found
}
