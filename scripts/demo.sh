#!/bin/bash
# The tour behind "make demo": real tasks in Docker sandboxes, graded by hidden tests. Needs no key and costs nothing.
# The first run builds one image per task; later runs find them.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

readonly K3EVAL=.venv/bin/k3eval
ALL=()
for family in tasks/*/; do
    compgen -G "${family}*/task.toml" >/dev/null && ALL+=(--task "$(basename "$family")")
done
OUT=results/runs/demo-$(date -u +%Y%m%dT%H%M%SZ)
CONCURRENCY=$(($(nproc) + 1)) # trials wait for the engine now and then
readonly ALL OUT CONCURRENCY

step() { printf '\n'; say "$*"; }

# score FOLDER: the score of the one job in it
score() {
    .venv/bin/python -c '
import json, pathlib, sys
(job,) = pathlib.Path(sys.argv[1]).glob("*/job.json")
print(json.loads(job.read_text())["score"])' "$1"
}

main() {
    step "What this machine has"
    "$K3EVAL" doctor

    step "Oracle: the known fix of every bundled task must score 1.0, or the task itself is broken"
    "$K3EVAL" run "${ALL[@]}" --agent oracle --concurrency "$CONCURRENCY" --threshold 1 --out "$OUT/oracle"

    step "Nop: an agent that does nothing must score 0, or the hidden tests prove nothing"
    "$K3EVAL" run "${ALL[@]}" --agent nop --concurrency "$CONCURRENCY" --out "$OUT/nop"
    [ "$(score "$OUT/nop")" = 0.0 ] || die "nop scored above 0: see $OUT/nop"

    step "K3 agent on the local backend: k3-nano, a 4M-parameter K3 trained in this repository, on the tasks it was made for"
    "$K3EVAL" run --task repo-fix-mini --agent k3 --model local/k3-nano --max-turns 12 \
        --concurrency "$CONCURRENCY" --out "$OUT/k3"

    step "Decode speed and cost of 1,000 tokens against context length, cold and cached prompt"
    "$K3EVAL" bench decode --contexts 1k,4k --model local/a --repeats 2 --output-tokens 128

    step "Done in $SECONDS s: oracle $(score "$OUT/oracle"), nop $(score "$OUT/nop"), k3-nano $(score "$OUT/k3"). Results: $OUT"
}

main
