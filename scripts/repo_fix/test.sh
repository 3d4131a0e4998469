#!/bin/bash
# Grade /app: the hidden tests, then (only if they pass) the package's own tests as a regression check.
# Writes /logs/verifier/{reward.txt,junit.xml,report.json,*.log}. Reward 1 needs every test of expected.json
# and a clean regression run. Tests run as `agent`, who can write none of that; the verdict is root's.
set -u
out=/logs/verifier
tree=/tmp/k3eval-regression
guard=/tmp/k3eval-guard
logs=/tmp/k3eval-logs # root's: a link that the tests leave must not be written through
scratch=/tmp/k3eval-scratch
mkdir -p "$out" "$guard" "$logs"
echo 0 > "$out/reward.txt"
chmod 600 /tests/expected.json
install -d -o agent -g agent "$scratch" "$tree"

# What a work tree could use to reach into the test process from outside the package: start-up modules,
# plugins, options, compiled files.
touch "$guard/sitecustomize.py" "$guard/usercustomize.py"
export PYTHONPATH="$guard" PYTHONSAFEPATH=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if [ -n "$(find /app -name '*.pyc' -print -quit)" ]; then
    export PYTHONPYCACHEPREFIX=$scratch/pycache # costs a second: nothing compiled is read
fi
unset PYTEST_ADDOPTS PYTEST_PLUGINS

# as_agent NAME SECONDS COMMAND...: run a command, end all that it started, keep its report and last output.
as_agent() {
    local name=$1 seconds=$2 drop="setpriv --reuid=agent --regid=agent --clear-groups" code
    shift 2
    HOME=/home/agent timeout -k 5 "$seconds" $drop "$@" > "$logs/$name.log" 2>&1
    code=$?
    $drop sh -c 'kill -9 -1; exit 7'
    [ $? -eq 7 ] || exit 1 # no process can be started: reward 0 stands
    tail -c 20000 "$logs/$name.log" > "$out/$name.log"
    if [ -f "$scratch/$name.xml" ] && [ ! -L "$scratch/$name.xml" ]; then
        head -c 8000000 "$scratch/$name.xml" > "$out/$name.xml"
    fi
    return $code
}

cd /tmp || exit 1
as_agent junit 240 python3 -m pytest -q --tb=line -p no:cacheprovider -c /dev/null --rootdir=/tests \
    --junitxml="$scratch/junit.xml" /tests/test_hidden.py
hidden=$?
tail -n 3 "$out/junit.log"

regression=none
if [ "$hidden" -eq 0 ]; then
    # the package's tests as they were released, whatever became of them in the work tree; nobody reads why one
    # failed, so nothing is spent on explaining it
    PYTEST_ADDOPTS="--assert=plain --junitxml=$scratch/regression.xml" as_agent regression 300 bash -c "
        cp -r /app/. $tree && find $tree -name conftest.py -delete &&
        tar -xf /opt/k3eval/upstream-tests.tar -C $tree --no-same-owner &&
        cd $tree && bash /tests/regression.sh"
    regression=$?
    tail -n 3 "$out/regression.log"
fi
python3 -I /tests/grade.py "$hidden" "$regression" "$out"
