# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:$PWD/src"
python3 -m pytest -q -p no:cacheprovider tests/fields tests/validators tests/test_form.py tests/test_csrf.py tests/test_widgets.py
