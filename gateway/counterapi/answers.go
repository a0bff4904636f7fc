package counterapi

import (
	"slices"
	"strconv"

	"headcount/counter"
	"headcount/gateway/calls"
)

// answerOne returns the answer with a counter.
func answerOne(one counter.Counter) calls.Answer {
	buffer := calls.Buffer()
	*buffer = one.AppendJSON(*buffer)

	return calls.BufferedJSON(buffer)
}

// answerMember returns the answer with a set, and whether the member is in it.
func answerMember(one counter.Counter, member bool) calls.Answer {
	b := append(make([]byte, 0, 256), '{')
	b = one.AppendMembers(b)
	b = append(b, `,"member":`...)
	b = strconv.AppendBool(b, member)

	return calls.JSON(append(b, '}'))
}

// answerList returns the answer with n counters.
func answerList(n int, at func(int) *counter.Counter) calls.Answer {
	buffer := calls.Buffer()
	// Few counters take more, so that the answer is written without growing.
	b := append(slices.Grow(*buffer, 16+160*n), `{"counters":[`...)
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		b = at(i).AppendJSON(b)
	}
	*buffer = append(b, "]}"...)

	return calls.BufferedJSON(buffer)
}
