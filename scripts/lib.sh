# shellcheck shell=bash
# Shared by the set-up scripts: messages, root rights, Debian packages. Sourced, never run.

say() { printf '==> %s\n' "$*"; }
die() { printf 'k3eval: %s\n' "$*" >&2; exit 3; }

# as_root COMMAND...: run with root rights. "can_root" says whether that is possible without hanging.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}
can_root() {
    [ "$(id -u)" -eq 0 ] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}
can_apt() {
    command -v apt-get >/dev/null && can_root
}

# apt_install PACKAGE...: from the distribution, with time limits; the log's end is shown on failure.
apt_install() {
    local log status=0
    log=$(mktemp)
    say "installing $* with apt-get"
    {
        as_root env DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -o DPkg::Lock::Timeout=300 update &&
            as_root env DEBIAN_FRONTEND=noninteractive timeout 1200 apt-get -o DPkg::Lock::Timeout=300 \
                install -y --no-install-recommends "$@"
    } </dev/null >"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        die "apt-get could not install $*: is the package archive reachable?"
    fi
    rm -f "$log"
}
