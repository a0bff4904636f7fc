package servertest

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// StartAt is Start of a program whose wall clock is wrong by offset, in whole seconds;
// its monotonic clock is right. The program reads the clock in memory that the kernel gives
// each process (the vDSO), so the function there is replaced before the program's first
// instruction. It needs nothing of the program.
func (p *Process) StartAt(cmd *exec.Cmd, offset time.Duration) error {
	return p.start(cmd, func() error {
		cmd.SysProcAttr.Ptrace = true // it stops when it is loaded
		if err := cmd.Start(); err != nil {
			return err
		}
		pid := cmd.Process.Pid
		var status syscall.WaitStatus
		_, err := syscall.Wait4(pid, &status, 0, nil)
		if err == nil && !status.Stopped() {
			err = fmt.Errorf("it ended with %d", status.ExitStatus())
		}
		if err == nil {
			err = setClock(pid, int32(offset/time.Second))
		}
		if err == nil {
			err = syscall.PtraceDetach(pid)
		}
		if err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return fmt.Errorf("servertest: a clock that is wrong: %w", err)
		}
		return nil
	})
}

// setClock replaces __vdso_clock_gettime of a process that this thread traces.
func setClock(pid int, seconds int32) error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return err
	}
	var from, to uintptr
	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
				return err
			}
		}
	}
	image := make([]byte, to-from)
	if n, err := syscall.PtracePeekData(pid, from, image); err != nil || n == 0 {
		return errors.Join(err, io.ErrUnexpectedEOF)
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return err
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return err
	}
	for _, s := range symbols {
		if s.Name == "__vdso_clock_gettime" {
			_, err := syscall.PtracePokeData(pid, from+uintptr(s.Value), clockCode(seconds))
			return err
		}
	}
	return errors.New("the kernel gives no clock")
}

// clockCode is clock_gettime(edi: which clock, rsi: *timespec), which asks the kernel, and
// moves the wall clock.
func clockCode(seconds int32) []byte {
	code := []byte{
		0xb8, 0xe4, 0, 0, 0, // mov eax, 228: clock_gettime
		0x0f, 0x05, //          syscall
		0x85, 0xff, //          test edi, edi: CLOCK_REALTIME is 0
		0x75, 0x07, //          jnz +7
		0x48, 0x81, 0x06, //    add qword [rsi], seconds
	}
	code = binary.LittleEndian.AppendUint32(code, uint32(seconds))
	return append(code, 0xc3) // ret
}
