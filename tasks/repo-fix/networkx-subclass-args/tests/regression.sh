# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:$PWD"
python3 -m pytest -q -p no:cacheprovider networkx/classes/tests/test_digraph.py networkx/classes/tests/test_multidigraph.py networkx/classes/tests/test_special.py networkx/tests/test_convert.py
