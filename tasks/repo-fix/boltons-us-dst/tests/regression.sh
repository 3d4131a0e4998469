# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:$PWD"
python3 -m pytest -q -p no:cacheprovider tests/test_timeutils.py tests/test_iterutils.py tests/test_strutils.py tests/test_typeutils.py
