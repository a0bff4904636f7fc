package gateway

import (
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
	if len(p) == 0 {
		return 0, nil
	}
	for {
		sent, _, errno := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
			syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL, 0, 0)
		switch errno {
		case 0:
			return int(sent), nil
		case syscall.EINTR:
		case syscall.EAGAIN:
			return 0, nil
		default:
			return 0, errno
		}
	}
}
