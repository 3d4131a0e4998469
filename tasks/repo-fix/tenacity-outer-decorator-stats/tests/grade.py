"""Turn the junit report and two exit codes into a reward: 1 when every expected test passed, else 0."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def passed_tests(report: Path) -> set[str]:
    """Names of the tests that passed, without the file; a report that is not there has none."""
    if not report.exists():
        return set()
    # pytest wrote it a moment ago in this container, which is thrown away
    cases = ElementTree.parse(report).getroot().iter("testcase")  # noqa: S314 - see above
    bad = {"failure", "error", "skipped"}
    return {case.get("name", "") for case in cases if not bad & {child.tag for child in case}}


def main() -> None:
    """Arguments: exit code of the hidden tests, exit code of the regression run, folder of the verdict."""
    hidden, regression, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    expected: dict[str, list[str]] = json.loads(Path(__file__).with_name("expected.json").read_text())
    passed = passed_tests(out / "junit.xml")
    missing = [name for names in expected.values() for name in names if name not in passed]
    reward = int(hidden == "0" and regression == "0" and not missing)
    report: dict[str, object] = {
        kind: {"passed": sum(name in passed for name in names), "of": len(names)}
        for kind, names in expected.items()
    }
    report |= {"hidden_exit": hidden, "regression_exit": regression, "reward": reward}
    sys.stdout.write(json.dumps(report) + "\n")
    (out / "report.json").write_text(json.dumps(report | {"not_passed": missing}, indent=1) + "\n")
    (out / "reward.txt").write_text(f"{reward}\n")


main()
