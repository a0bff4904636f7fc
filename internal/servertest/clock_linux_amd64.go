package servertest

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// startWithClock starts a program whose wall clock is wrong by offset; its monotonic clock is right. Programs read
// clocks by functions in memory that the kernel gives each process (the vDSO), so startWithClock replaces those before
// the program's first instruction. That works with every program.
func startWithClock(cmd *exec.Cmd, offset time.Duration) error {
	cmd.SysProcAttr.Ptrace = true // the program stops when it is loaded
	if err := cmd.Start(); err != nil {
		return err
	}

	pid := cmd.Process.Pid
	var status syscall.WaitStatus
	// At its first instruction the vDSO is mapped, and nothing has used it.
	_, err := syscall.Wait4(pid, &status, 0, nil)
	if err == nil && !status.Stopped() {
		err = fmt.Errorf("it ended with %d", status.ExitStatus())
	}

	if err == nil {
		err = setClock(pid, offset)
	}

	if err == nil {
		err = syscall.PtraceDetach(pid)
	}

	// It must not run with the right clock, with which the test would prove nothing.
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return fmt.Errorf("servertest: a clock that is wrong: %w", err)
	}

	return nil
}

// SetClock makes the wall clock of the running process wrong by offset, in whole seconds. The process must have been
// started with a Clock other than 0. It stands still for a moment.
func (p *Process) SetClock(offset time.Duration) error {
	p.Pause()
	defer p.Resume()

	return setClock(p.PID(), offset)
}

// setClock replaces the functions for clocks in the vDSO of a process that stands still. This process must be allowed
// to trace it.
func setClock(pid int, offset time.Duration) error {
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer memory.Close()

	from, to, err := vdsoOf(pid)
	if err != nil {
		return err
	}

	// The vDSO is a complete ELF file, with the names of its functions.
	image := make([]byte, to-from)
	if _, err := memory.ReadAt(image, int64(from)); err != nil {
		return err
	}

	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return err
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return err
	}

	codes := clockCodes(int32(offset / time.Second))
	for _, s := range symbols {
		code := codes[s.Name]
		// Longer code would overwrite the function behind it.
		if uint64(len(code)) > s.Size {
			return fmt.Errorf("%s of the kernel has no room for %d bytes", s.Name, len(code))
		}
		if _, err := memory.WriteAt(code, int64(from)+int64(s.Value)); err != nil {
			return err
		}
		delete(codes, s.Name)
	}

	// A function that was not replaced would still return the right time.
	if len(codes) > 0 {
		return fmt.Errorf("the kernel lacks %d functions for clocks", len(codes))
	}
	return nil
}

// vdsoOf returns the addresses of a process's vDSO, which differ from process to process.
func vdsoOf(pid int) (from, to uintptr, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, 0, err
	}

	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			_, err = fmt.Sscanf(line, "%x-%x", &from, &to)
		}
	}

	return from, to, err
}

// clockCodes returns replacements for functions of the vDSO. They ask the kernel, and add seconds to the wall clock.
func clockCodes(seconds int32) map[string][]byte {
	by := binary.LittleEndian.AppendUint32(nil, uint32(seconds))

	return map[string][]byte{
		"__vdso_clock_gettime": slices.Concat([]byte{ // edi: which clock, rsi: *timespec
			0xb8, 0xe4, 0, 0, 0, // mov eax, 228: clock_gettime
			0x0f, 0x05, //          syscall
			0x85, 0xff, //          test edi, edi: CLOCK_REALTIME is 0
			0x75, 0x07, //          jnz +7
			0x48, 0x81, 0x06, //    add qword [rsi], seconds
		}, by, []byte{0xc3}), //    ret
		"__vdso_gettimeofday": slices.Concat([]byte{ // rdi: *timeval, rsi: *timezone
			0xb8, 0x60, 0, 0, 0, // mov eax, 96: gettimeofday
			0x0f, 0x05, //          syscall
			0x48, 0x81, 0x07, //    add qword [rdi], seconds
		}, by, []byte{0xc3}), //    ret
		"__vdso_time": slices.Concat([]byte{ // rdi: *time, or 0
			0xb8, 0xc9, 0, 0, 0, // mov eax, 201: time
			0x0f, 0x05, //          syscall
			0x48, 0x05, //          add rax, seconds
		}, by, []byte{
			0x48, 0x85, 0xff, //    test rdi, rdi
			0x74, 0x03, //          jz +3
			0x48, 0x89, 0x07, //    mov [rdi], rax
			0xc3, //                ret
		}),
	}
}
