package websocket

import (
	"crypto/sha1"
	"encoding/base64"
	"net/http"
	"strings"
)

// The headers of a handshake in net/http's spelling. Any other spelling would cost a new
// string at each call.
const (
	headerAccept   = "Sec-Websocket-Accept"
	headerKey      = "Sec-Websocket-Key"
	headerProtocol = "Sec-Websocket-Protocol"
	headerVersion  = "Sec-Websocket-Version"
)

// CheckUpgrade checks that r is a handshake that offers this subprotocol or none. For
// a valid handshake the status is 0. Otherwise detail describes the problem, and status
// is the status of the refusal.
func CheckUpgrade(r *http.Request, subprotocol string) (detail string, status int) {
	upgrade := hasToken(r.Header, "Connection", "upgrade") && hasToken(r.Header, "Upgrade", "websocket")
	if !r.ProtoAtLeast(1, 1) || !upgrade {
		detail = "This is a WebSocket endpoint: send an upgrade, with the subprotocol " + subprotocol + "."
		return detail, http.StatusUpgradeRequired
	}

	if r.Header.Get(headerVersion) != "13" {
		return "The server supports only version 13 of the WebSocket protocol.", http.StatusBadRequest
	}

	if keys := r.Header.Values(headerKey); len(keys) != 1 || !validKey(keys[0]) {
		return "The handshake needs one Sec-WebSocket-Key of 16 bytes in base64.", http.StatusBadRequest
	}

	if len(r.Header.Values(headerProtocol)) > 0 && !hasToken(r.Header, headerProtocol, subprotocol) {
		return "The only subprotocol is " + subprotocol + "; offer it or none.", http.StatusBadRequest
	}

	return "", 0
}

// SetUpgrade sets the headers of the answer to r, which CheckUpgrade must have
// accepted. The answer's status must be 101.
func SetUpgrade(h http.Header, r *http.Request, subprotocol string) {
	h.Set("Upgrade", "websocket")
	h.Set("Connection", "Upgrade")
	h.Set(headerAccept, acceptKey(r.Header.Get(headerKey)))

	// A client that offered none must not be given one.
	if len(r.Header.Values(headerProtocol)) > 0 {
		h.Set(headerProtocol, subprotocol)
	}
}

// acceptKey is the answer to a handshake's key.
func acceptKey(key string) string {
	// The text is that of RFC 6455, section 1.3.
	sum := sha1.Sum([]byte(strings.TrimSpace(key) + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))

	return base64.StdEncoding.EncodeToString(sum[:])
}

// hasToken reports whether a comma-separated header has the token.
func hasToken(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for t := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(t), token) {
				return true
			}
		}
	}

	return false
}

func validKey(key string) bool {
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(key))

	return err == nil && len(b) == 16
}
