package config

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"headcount/presence/region"
)

// PeerNames returns the names of the other regions.
func (c *Server) PeerNames() (names []string) {
	for _, peer := range c.Peers {
		name, _ := region.SplitPeer(peer)
		names = append(names, name)
	}

	return names
}

// ClusterKeys returns the keys of the messages between processes. The first one signs, all of them verify.
func (c *Server) ClusterKeys() [][]byte { return keysOf(c.ClusterSecrets) }

// ClusterDigest identifies the cluster secrets without revealing them.
func (c *Server) ClusterDigest() string {
	// Text, not an empty value, so that a process with a secret and one without notice each other.
	if len(c.ClusterSecrets) == 0 {
		return "none"
	}

	return strings.Join(keyed(c.ClusterSecrets, "headcount cluster check"), ",")
}

// IDKeys returns the keys of anonymous ids. Without --id-secret all gateways of a cluster derive the same ones. A
// cluster without a cluster secret runs on the loopback of this machine only, to try it out.
func (c *Server) IDKeys() [][]byte {
	secrets := c.IDSecrets
	// Different texts make unrelated keys of one secret, so a leaked key of ids signs no message of the cluster.
	if len(secrets) == 0 {
		of := c.ClusterSecrets
		if len(of) == 0 {
			of = []string{"loopback"}
		}
		secrets = keyed(of, "headcount ids")
	}

	return keysOf(secrets)
}

// keyed returns for each secret a keyed hash of the text, from which the secret cannot be computed.
func keyed(secrets []string, text string) (values []string) {
	for _, secret := range secrets {
		mac := hmac.New(sha256.New, []byte(secret))
		mac.Write([]byte(text))
		values = append(values, hex.EncodeToString(mac.Sum(nil)))
	}

	return values
}

func keysOf(secrets []string) (keys [][]byte) {
	for _, secret := range secrets {
		keys = append(keys, []byte(secret))
	}

	return keys
}
