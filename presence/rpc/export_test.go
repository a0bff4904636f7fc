package rpc

import (
	"encoding/hex"
	"net/http"

	"headcount/presence/seal"
)

var (
	ParseUpdates = parseUpdates
	ParseHold    = parseHold
	DigestOf     = digestOf
)

// Signed signs a request whose header has no mac.
func Signed(secrets [][]byte, r *http.Request, header string) string {
	keys, err := seal.NewKeys(secrets, purpose)
	if err != nil {
		panic(err)
	}
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	mac := keys.Signer().Sign(nil, signed(r.Method, host, r.URL.RequestURI(), r.Header.Get("Content-Digest"), header))

	return header + macPart + hex.EncodeToString(mac)
}
