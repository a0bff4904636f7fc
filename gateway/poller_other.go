//go:build !linux

package gateway

import "context"

// poller is for Linux; elsewhere every connection has a goroutine that reads.
type poller struct{}

func newPoller() (*poller, error) { return nil, errNoPoller }

func (*poller) add(*conn) error { return errNoPoller }

func (*poller) remove(*conn) {}

func (*poller) run(context.Context) {}
