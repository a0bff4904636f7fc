#!/bin/sh
# An upgrade restarts a running server. A first installation starts nothing, because an open port is the operator's
# decision.
# Without systemd, as in a container or a root directory under construction, there is nothing to do. A systemd that does
# not answer says so, and must not leave the package half-configured.
set -e
if [ -z "$DPKG_ROOT" ] && [ -d "${SYSTEMD_RUNNING:-/run/systemd/system}" ]; then
	systemctl daemon-reload || true
	systemctl try-restart headcount.service || true
fi
