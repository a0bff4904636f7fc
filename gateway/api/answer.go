package api

import (
	"encoding/json"
	"fmt"
	"strings"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Unavailable refuses a call because nothing can be served now. The client is told the reason.
func Unavailable(reason error) error {
	return calls.Refuse(fmt.Errorf("%w: %w", calls.ErrUnavailable, reason), reason.Error()+"; try again")
}

// storeAway refuses a call that the store, or an owner, could not carry out. The cause is only logged.
func storeAway(cause error) error {
	const detail = "; try again"
	return calls.Refuse(fmt.Errorf("%w: %w", calls.ErrUnavailable, cause), presence.ErrUnavailable.Error()+detail)
}

// answerJSON answers with the JSON of v.
func answerJSON(v any) calls.Answer { return calls.PackedJSON(httppolicy.JSON(v)) }

// sentence returns the text of an error as a sentence.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// foreign is text of external origin. In its JSON, HTML is escaped.
type foreign string

// MarshalJSON implements json.Marshaler.
func (s foreign) MarshalJSON() ([]byte, error) { return json.Marshal(string(s)) }
