#!/bin/bash
# Make sure that a Docker engine answers. One that runs is used (DOCKER_HOST is respected); else, on Debian
# or Ubuntu with root or sudo, it is installed from the distribution and started; elsewhere: a clear error.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

readonly STATE=$PWD/.k3eval
readonly LOG=$STATE/dockerd.log
readonly WAIT_S=90

# Asks the way k3eval itself does; prints the version, or on stderr why not.
engine_version() {
    timeout 20 .venv/bin/python - <<'PY'
import sys

import docker
from docker.errors import DockerException

try:
    print(docker.from_env(timeout=10).version()["Version"])
except (DockerException, OSError) as error:
    sys.exit(str(error)[-160:])
PY
}

install_engine() {
    local packages=(docker.io)
    # where the kernel enforces AppArmor, the engine refuses to start containers without its parser
    if grep -qs Y /sys/module/apparmor/parameters/enabled && ! command -v apparmor_parser >/dev/null; then
        packages+=(apparmor)
    fi
    apt_install "${packages[@]}"
}

start_engine() {
    if [ -d /run/systemd/system ]; then
        say "starting the Docker engine with systemctl"
        as_root timeout 120 systemctl start docker </dev/null || true
        return
    fi
    say "starting dockerd (log: .k3eval/dockerd.log, process id: .k3eval/dockerd.pid)"
    mkdir -p "$STATE"
    # a session of its own, with nothing of ours open: it must outlive this script and hold no pipe of it
    as_root setsid --fork dockerd --group "$(id -g)" --pidfile "$STATE/dockerd.pid" </dev/null >"$LOG" 2>&1
}

# The engine belongs to the group "docker", which a user just added is not in until the next login.
allow_this_user() {
    local socket=/var/run/docker.sock
    if [ "$(id -u)" -ne 0 ] && [ -S "$socket" ] && [ ! -w "$socket" ]; then
        say "giving this user's group the use of $socket until the engine restarts"
        as_root chgrp "$(id -g)" "$socket"
    fi
}

wait_for_engine() {
    local waited=0 version
    while [ "$waited" -lt "$WAIT_S" ]; do
        if version=$(engine_version 2>/dev/null); then
            say "Docker engine $version answers"
            return
        fi
        allow_this_user
        sleep 1
        waited=$((waited + 1))
    done
    [ -s "$LOG" ] && tail -n 15 "$LOG" >&2
    die "the Docker engine was started but does not answer: $(engine_version 2>&1 | tail -n 1)"
}

main() {
    local answer
    if answer=$(engine_version 2>&1); then
        say "Docker engine $answer answers"
        return
    fi
    answer=$(printf '%s' "$answer" | tail -n 1)
    [ -z "${DOCKER_HOST:-}" ] || die "the engine at DOCKER_HOST does not answer ($answer): start it, or unset DOCKER_HOST"
    case "$answer" in
    *"Permission denied"*)
        die "a Docker engine runs but this user may not use it: run 'sudo usermod -aG docker $(id -un)' and log in again" ;;
    esac
    if ! command -v dockerd >/dev/null; then
        can_apt || die "no Docker engine answers ($answer): install and start Docker, or set DOCKER_HOST"
        say "no Docker engine here"
        install_engine
    fi
    can_root || die "the Docker engine is installed but not running, and starting it needs root: start it, or set DOCKER_HOST"
    start_engine
    wait_for_engine
}

main
