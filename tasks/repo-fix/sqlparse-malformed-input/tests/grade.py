"""Turn two junit reports and two exit codes into a reward: 1 when every expected test passed, else 0.

The reports come from processes that imported the work tree: what cannot be read, or names a failure, is 0.
"""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

BAD = {"failure", "error", "skipped"}


def results(report: Path) -> dict[str, set[str]]:
    """Each test's name, without the file, and what befell it; a report that is missing or broken has none."""
    try:
        # pytest wrote it a moment ago in this container, which is thrown away
        cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314 - see above
        return {case.get("name", ""): BAD & {child.tag for child in case} for case in cases}
    except (OSError, ElementTree.ParseError):
        return {}


def clean(found: dict[str, set[str]]) -> bool:
    """Whether at least one test passed and none failed."""
    return any(not bad for bad in found.values()) and not any(bad - {"skipped"} for bad in found.values())


def main() -> None:
    """Arguments: exit code of the hidden tests, exit code of the regression run, folder of the verdict."""
    hidden, regression, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    expected: dict[str, list[str]] = json.loads(Path(__file__).with_name("expected.json").read_text())
    passed = {name for name, bad in results(out / "junit.xml").items() if not bad}
    missing = [name for names in expected.values() for name in names if name not in passed]
    unbroken = regression == "0" and clean(results(out / "regression.xml"))
    reward = int(hidden == "0" and unbroken and not missing)
    report: dict[str, object] = {
        kind: {"passed": sum(name in passed for name in names), "of": len(names)}
        for kind, names in expected.items()
    }
    report |= {"hidden_exit": hidden, "regression_exit": regression, "unbroken": unbroken, "reward": reward}
    sys.stdout.write(json.dumps(report) + "\n")
    (out / "report.json").write_text(json.dumps(report | {"not_passed": missing}, indent=1) + "\n")
    (out / "reward.txt").write_text(f"{reward}\n")


main()
