#!/bin/sh
# A removal stops the server; dpkg calls it "remove", rpm 0. An upgrade stops nothing: postinstall.sh restarts.
# A systemd that does not answer says so, and must not keep the package from being removed.
set -e
case $1 in remove | 0)
	if [ -z "$DPKG_ROOT" ] && [ -d "${SYSTEMD_RUNNING:-/run/systemd/system}" ]; then
		systemctl disable --now headcount.service || true
	fi
	;;
esac
