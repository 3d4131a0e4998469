#!/bin/bash
# Make .venv and install k3eval into it, pinned by constraints.txt. Does nothing when nothing changed.
# PYTHON=/path/to/python3.11 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

readonly PIP_VERSION=26.3
readonly STAMP=.venv/k3eval-installed

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# The first Python that will do; one that can make environments before one that needs a package for it.
find_python() {
    local candidate test
    for test in has_venv true; do
        for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 /usr/bin/python3.11}; do
            if is_new_enough "$candidate" && "$test" "$candidate"; then
                printf '%s\n' "$candidate"
                return
            fi
        done
    done
    return 1
}

wanted_stamp() {
    pwd
    cksum pyproject.toml constraints.txt scripts/setup.sh
}

make_venv() {
    local python=$1 version
    if ! has_venv "$python"; then
        version=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        can_apt || die "$python has no venv module: install $version (Debian, Ubuntu), or set PYTHON to another python3.11"
        apt_install "$version"
    fi
    say "creating .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
}

main() {
    local python
    if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ] && [ -x .venv/bin/k3eval ]; then
        return
    fi
    if ! python=$(find_python); then
        [ -z "${PYTHON:-}" ] || die "PYTHON is no Python 3.11 or newer: set it to one, or unset it"
        can_apt || die "no Python 3.11 or newer: install one and set PYTHON to it"
        apt_install python3 python3-venv
        python=$(find_python) || die "the distribution's python3 is older than 3.11: install a newer one and set PYTHON to it"
    fi
    # a moved or broken environment is made anew
    if ! .venv/bin/python -c 'import pip' 2>/dev/null || ! is_new_enough .venv/bin/python; then
        make_venv "$python"
    fi
    say "installing k3eval and its pinned dependencies into .venv (minutes the first time)"
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
    .venv/bin/python -m pip install -qq "pip==$PIP_VERSION"
    .venv/bin/python -m pip install -qq -c constraints.txt -e '.[local,dev]'
    wanted_stamp > "$STAMP"
}

main
