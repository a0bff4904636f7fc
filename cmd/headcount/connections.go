package main

import "headcount/internal/machine"

// Open files that are reserved for everything other than clients' connections.
const (
	// Standard streams, listeners, the poller, the data directory, and some connections to the admin address.
	filesOfProcess = 40
	filesOfCluster = 60 // connections to Redis, and between processes
	filesOfPeer    = 30 // connections to the Redis of one --peer
)

// shareOfTLS is how many times as much memory a connection takes with TLS: 24 KB were measured,
// with the memory that its handshake leaves behind.
const shareOfTLS = 3

// maxConnections returns how many connections the gateway accepts at once. The number comes
// from --max-connections or, without that flag, from the memory. It is never more than the
// limit of open files allows.
func (s *system) maxConnections() int {
	n := s.cfg.MaxConnections
	if n == 0 {
		n = connectionsByMemory(machine.Memory())
		// A number that the operator gave is taken as it is.
		if s.cfg.HasTLS() {
			n /= shareOfTLS
		}
	}

	// An accept that fails for want of files would also starve Redis and the data directory, so clients are refused
	// before that.
	files, limited := machine.OpenFiles()
	if !limited {
		return n
	}

	fit := connectionsByFiles(files, s.cfg.Redis != "", len(s.cfg.Peers))
	// A number by memory is only a guess, so falling short of it is not worth a warning unless hardly anything is left.
	if fit < s.cfg.MaxConnections || fit < 100 {
		s.log.Warn().Uint64("files", files).Int("connections", min(n, fit)).Msg("the limit of open files bounds " +
			"the connections; raise ulimit -n for more")
	}

	return min(n, fit)
}

// connectionsByMemory returns how many connections of 8 KiB fit into half of the memory,
// which is in bytes, but at least 100. An idle connection was measured at 4.3 KB, without
// the kernel's part. In addition there may be a tenth as many short connections of 13 KB
// each.
func connectionsByMemory(memory uint64) int {
	const each = 8 << 10

	return int(max(memory/2/each, 100))
}

// connectionsByFiles returns how many long connections fit into this many open files. It
// leaves room for the short connections that the gateway's ConnLimiter accepts: a tenth of
// the long ones, at least 100, but never more than the long ones. A tenth of the files
// stays free.
func connectionsByFiles(files uint64, cluster bool, peers int) int {
	reserved := uint64(filesOfProcess)
	if cluster {
		reserved += filesOfCluster + filesOfPeer*uint64(peers)
	}

	// The subtraction is of unsigned numbers, so what is reserved is at most all of them.
	room := files - min(files, max(reserved, files/10))

	// Short connections come on top: as many as long ones up to 100, then 100, then a tenth.
	switch {
	case room <= 200:
		room /= 2
	case room <= 1100:
		room -= 100
	default:
		room = room / 11 * 10
	}

	// Where files are unlimited in all but name the number must still fit an int of 32 bits.
	return int(min(max(room, 1), 1<<30))
}
