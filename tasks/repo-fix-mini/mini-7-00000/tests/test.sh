#!/bin/bash
# Reward 1 when every hidden test passes. The project is imported from /app; nothing of its own tests,
# start-up modules or pytest settings is used. The tests run as `agent`, who cannot write the reward; the
# verdict is root's, after everything that they started has ended.
set -u
out=/logs/verifier
scratch=/tmp/k3eval-scratch
drop="setpriv --reuid=agent --regid=agent --clear-groups"
mkdir -p "$out"
echo 0 > "$out/reward.txt"
install -d -o agent -g agent "$scratch"
unset PYTEST_ADDOPTS PYTEST_PLUGINS
cd /tests || exit 1
HOME=/home/agent timeout -k 5 120 $drop python -I -c '
import sys
import pytest
sys.path += ["/tests", "/app"]  # last, so that the project cannot stand in for pytest
sys.exit(pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=/tests",
                      "--confcutdir=/tests", "--junitxml=/tmp/k3eval-scratch/junit.xml", "/tests"]))' \
    > /tmp/k3eval-log 2>&1
code=$?
$drop sh -c 'kill -9 -1; exit 7'
[ $? -eq 7 ] || exit 1 # no process can be started: reward 0 stands
tail -c 20000 /tmp/k3eval-log
[ -f "$scratch/junit.xml" ] && [ ! -L "$scratch/junit.xml" ] || exit 1
head -c 8000000 "$scratch/junit.xml" > "$out/junit.xml"
[ "$code" -eq 0 ] && python -I /tests/all_passed.py "$out/junit.xml" && echo 1 > "$out/reward.txt"
exit 0
