#!/bin/bash
# Apply the difference between the two releases, which image stage "oracle" leaves in /solution/fix.patch.
set -eu
if [ ! -s /solution/fix.patch ]; then
    echo "no /solution/fix.patch: build stage \"oracle\" of environment/Dockerfile and copy it from there" >&2
    exit 1
fi
patch --batch -d /app -p1 < /solution/fix.patch
