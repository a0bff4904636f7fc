//go:build !portable

package socket

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// descriptor is the file descriptor of a socket, for calls that do not wait. The
// caller must make sure that the socket is open.
type descriptor int32

const noDescriptor descriptor = -1

func descriptorOf(c any) descriptor {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return noDescriptor
	}

	raw, err := sc.SyscallConn()
	if err != nil {
		return noDescriptor
	}

	d := noDescriptor
	_ = raw.Control(func(fd uintptr) { d = descriptor(fd) }) // an error means that the socket is closed already

	return d
}

// send gives the socket as much of p as it takes at once. n is 0 if it takes nothing.
//
// send makes a raw system call, which Go's scheduler does not see. For each call that
// it sees, the scheduler wakes a thread every 20 µs to check whether the call waits;
// this one never waits. And send(2) need not look up the kind of descriptor, as
// write(2) does. Together this saves a quarter of the cost of a delivery.
func (d descriptor) send(p []byte) (n int, err error) {
	n, err = d.call(syscall.SYS_SENDTO, p)
	if err == syscall.EAGAIN {
		return 0, nil
	}

	return n, err
}

// receive reads what the socket has. n is 0 if it has nothing; err is io.EOF at the
// end. p must not be empty.
func (d descriptor) receive(p []byte) (n int, err error) {
	n, err = d.call(syscall.SYS_RECVFROM, p)
	if err == syscall.EAGAIN {
		return 0, nil
	}
	if err == nil && n == 0 {
		return 0, io.EOF
	}

	return n, err
}

// call makes a sendto(2) or a recvfrom(2) that does not wait.
func (d descriptor) call(number uintptr, p []byte) (n int, err error) {
	if len(p) == 0 {
		return 0, nil
	}

	for {
		// Raw, since a call that does not wait need not be announced to the scheduler.
		n, _, errno := syscall.RawSyscall6(number, uintptr(d), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
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

// takeOver takes a Conn over, with its place in a Poller.
func (w *Wire) takeOver(c net.Conn) {
	own, ok := c.(*Conn)
	if !ok {
		return
	}

	d := own.take()
	if d == noDescriptor { // it is a net.Conn like any other by now, or is closed
		return
	}

	w.conn = nil
	w.fd = d
	w.from = own.from
	w.slot = own.slot
}

// duplicate returns another descriptor of the same socket.
func (d descriptor) duplicate() (descriptor, error) {
	fd, err := unix.FcntlInt(uintptr(d), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return noDescriptor, os.NewSyscallError("fcntl", err)
	}

	return descriptor(fd), nil
}

// dropConnLocked leaves a polled wire nothing but a descriptor. What net keeps of a connection, its addresses and a
// place in the runtime's poller, would be a quarter of what a silent client costs. TLS and a write that waits need it.
// It also stays when too many files are open.
func (w *Wire) dropConnLocked() {
	if w.late != nil || w.tls != nil {
		return
	}

	own, err := w.fd.duplicate()
	if err != nil {
		return
	}

	_ = w.conn.Close()
	w.conn = nil
	w.fd = own
}

// waitsLocked prepares for a write that waits for the client, for which the runtime has to watch the descriptor.
func (w *Wire) waitsLocked() {
	if w.conn == nil {
		w.conn = os.NewFile(uintptr(w.fd), "socket") // which from now on closes the descriptor
	}
}

// closeLocked closes the connection.
func (w *Wire) closeLocked() error {
	if w.conn != nil {
		return w.conn.Close()
	}

	return os.NewSyscallError("close", unix.Close(int(w.fd)))
}
