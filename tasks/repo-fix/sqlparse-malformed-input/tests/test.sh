#!/bin/bash
# Grade /app: the hidden tests, then (only if they pass) the package's own tests as a regression check.
# Writes /logs/verifier/{reward.txt,junit.xml,report.json,regression.log}. Reward 1 needs every test of
# expected.json and a clean regression run. Needs no privilege: /app is only read.
set -u
out=/logs/verifier
tree=/tmp/k3eval-regression
guard=/tmp/k3eval-guard
mkdir -p "$out" "$guard"
echo 0 > /logs/verifier/reward.txt

# What a work tree could use to reach into the test process from outside the package: start-up modules,
# plugins, options, compiled files.
touch "$guard/sitecustomize.py" "$guard/usercustomize.py"
export PYTHONPATH="$guard" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if [ -n "$(find /app -name '*.pyc' -print -quit)" ]; then
    export PYTHONPYCACHEPREFIX=/tmp/k3eval-pycache # costs a second: nothing compiled is read
fi
unset PYTEST_ADDOPTS PYTEST_PLUGINS

cd /tmp || exit 1
timeout -k 5 240 python3 -m pytest -q --tb=line -p no:cacheprovider -c /dev/null --rootdir=/tests \
    --junitxml="$out/junit.xml" /tests/test_hidden.py
hidden=$?

regression=none
if [ "$hidden" -eq 0 ]; then
    # the package's tests as they were released, whatever became of them in the work tree
    rm -rf "$tree" && cp -r /app "$tree" && find "$tree" -name conftest.py -delete
    tar -xf /opt/k3eval/upstream-tests.tar -C "$tree" --no-same-owner
    (cd "$tree" && timeout -k 5 300 bash /tests/regression.sh) > "$out/regression.log" 2>&1
    regression=$?
    tail -n 3 "$out/regression.log"
fi
python3 /tests/grade.py "$hidden" "$regression" "$out"
