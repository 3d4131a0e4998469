# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:$PWD"
cd tests && python3 runtests.py --parallel=1 model_formsets model_formsets_regress inline_formsets model_forms modeladmin generic_inline_admin forms_tests.tests.test_formsets
