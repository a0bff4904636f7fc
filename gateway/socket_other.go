//go:build !linux

package gateway

import (
	"io"
	"syscall"
)

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

// receiveNow takes what the non-blocking socket has; n is 0 when that is
// nothing, and err is io.EOF at the end.
func receiveNow(fd int, p []byte) (n int, err error) {
	for {
		n, err = syscall.Read(fd, p)
		switch {
		case err == nil && n == 0:
			return 0, io.EOF
		case err == nil:
			return n, nil
		case err == syscall.EAGAIN: //nolint:errorlint
			return 0, nil
		case err != syscall.EINTR: //nolint:errorlint
			return 0, err
		}
	}
}
