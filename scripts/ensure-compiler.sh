#!/bin/bash
# ensure-compiler.sh [--if-possible]: make sure that a C compiler is there, for the local backend's native step.
# k3eval itself runs without one, many times slower (the step is then plain torch); its tests need one.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

for compiler in cc gcc clang; do
    command -v "$compiler" >/dev/null && exit 0
done
if [ "${1:-}" = --if-possible ]; then
    { can_apt && (apt_install gcc libc6-dev); } ||
        say "no C compiler: local models run on plain torch, which is slower; gcc or clang on PATH would do"
    exit 0
fi
can_apt || die "no C compiler on PATH: the tests of the native kernels need one; install gcc or clang"
apt_install gcc libc6-dev
