package gateway

import (
	"io"
	"syscall"
	"unsafe"
)

// sendNow gives the socket what it takes of p, at once; n is 0 when that is
// nothing.
//
// It does not tell Go's scheduler of the call, which never waits. For calls it
// knows of, the scheduler wakes a thread every 20 µs to see whether they do.
// And send(2) knows that it has a socket, write(2) has to find out: together
// that is a quarter of the cost of a delivery.
func sendNow(fd int, p []byte) (n int, err error) {
	if n, err = socketNow(syscall.SYS_SENDTO, fd, p); err == syscall.EAGAIN {
		return 0, nil
	}
	return n, err
}

// receiveNow takes what the socket has; n is 0 when that is nothing, and err
// is io.EOF at the end.
func receiveNow(fd int, p []byte) (n int, err error) {
	switch n, err = socketNow(syscall.SYS_RECVFROM, fd, p); {
	case err == syscall.EAGAIN:
		return 0, nil
	case err == nil && n == 0:
		return 0, io.EOF
	}
	return n, err
}

// socketNow is a sendto(2) or a recvfrom(2) that does not wait.
func socketNow(call uintptr, fd int, p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		n, _, errno := syscall.RawSyscall6(call, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
			syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL, 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case syscall.EINTR:
		default:
			return 0, errno
		}
	}
}
