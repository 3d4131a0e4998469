#!/bin/bash
# Write constraints.txt from what .venv has: versions only, valid on every machine.
# Left out: this project, build suffixes (+cpu), and what torch pins by itself (triton, CUDA libraries),
# because a torch built for CPUs and one built for CUDA want different ones.
set -euo pipefail
cd "$(dirname "$0")/.."

{
    echo '# Pinned versions for "make setup"; written by "make constraints".'
    .venv/bin/python -m pip freeze --exclude-editable |
        grep -E '^[A-Za-z0-9._-]+==' |
        grep -vE '^(triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==' |
        sed -E 's/\+[A-Za-z0-9.]+$//'
} > constraints.txt.new
mv constraints.txt.new constraints.txt
