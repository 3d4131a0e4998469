# Run in a copy of the work tree; the package is imported from there.
export PYTHONPATH="$PYTHONPATH:$PWD"
python3 -m pytest -q -p no:cacheprovider tests --deselect tests/test_asyncio.py::TestContextManager::test_sleeps --deselect tests/test_asyncio.py::TestDecoratorWrapper::test_retry_function_attributes --deselect tests/test_tenacity.py::TestDecoratorWrapper::test_retry_function_attributes
