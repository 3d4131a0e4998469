# Exit 0 when the report names every hidden test as passed.
import ast
import pathlib
import sys
import xml.etree.ElementTree

wanted = {
    f"{path.stem}::{node.name}"
    for path in pathlib.Path(__file__).parent.glob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
}
cases = xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase")
passed = {f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0}
sys.exit(0 if wanted and wanted <= passed else 1)
