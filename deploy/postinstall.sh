#!/bin/sh
# An upgrade restarts a running server. A first installation starts nothing, because an open port is the operator's decision.
# Without systemd, as in a container or a root directory under construction, there is nothing to do.
set -e
if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	systemctl try-restart headcount.service
fi
