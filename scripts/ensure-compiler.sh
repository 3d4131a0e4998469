#!/bin/bash
# Make sure that a C compiler is there: the native kernels of the local backend are built with it and tested.
# k3eval itself runs without one (the kernels are then plain torch); only "make test" asks for it.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

for compiler in cc gcc clang; do
    command -v "$compiler" >/dev/null && exit 0
done
can_apt || die "no C compiler on PATH: the tests of the native kernels need one; install gcc or clang"
apt_install gcc libc6-dev
