#!/bin/sh
# A removal stops the server; dpkg calls it "remove", rpm 0. An upgrade stops nothing: postinstall.sh restarts.
set -e
case $1 in remove | 0)
	if [ -z "$DPKG_ROOT" ] && [ -d /run/systemd/system ]; then
		systemctl disable --now headcount.service
	fi
	;;
esac
