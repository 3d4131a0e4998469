#!/bin/bash
# Reward 1 when every hidden test passes. The project is imported from /app; nothing of its own tests,
# start-up modules or pytest settings is used.
set -u
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
unset PYTEST_ADDOPTS PYTEST_PLUGINS
cd /tests || exit 1
if timeout -k 5 120 python -I -c '
import sys
sys.path[:0] = ["/tests", "/app"]
import pytest
sys.exit(pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=/tests",
                      "--confcutdir=/tests", "--junitxml=/logs/verifier/junit.xml", "/tests"]))'
then
    echo 1 > /logs/verifier/reward.txt
fi
