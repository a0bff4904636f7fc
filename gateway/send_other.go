//go:build !linux

package gateway

import "syscall"

// sendNow gives the non-blocking socket what it takes of p, at once; n is 0
// when that is nothing.
func sendNow(fd int, p []byte) (n int, err error) {
	for {
		n, err = syscall.Write(fd, p)
		switch err { //nolint:errorlint
		case nil:
			return n, nil
		case syscall.EINTR:
		case syscall.EAGAIN:
			return 0, nil
		default:
			return 0, err
		}
	}
}
