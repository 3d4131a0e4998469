"""Generated tasks in real containers: the oracle passes, nop and a near miss fail, one image serves all."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3eval_harness.job import validate_task
from k3eval_harness.sandbox.base_image import BASE_REF, ensure_base_image
from k3eval_harness.sandbox.engine import connect
from k3eval_harness.sandbox.images import image_name
from k3eval_harness.task import load_task
from k3eval_harness.task.mini import generate, make_project

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SERIES = 41


def test_generated_tasks_are_fair_and_share_an_image(tmp_path: Path) -> None:
    client = connect()
    try:
        base = ensure_base_image(client, BASE_REF).id
    finally:
        client.close()
    first, second = (load_task(folder) for folder in generate(2, SERIES, tmp_path))
    assert image_name(first, {BASE_REF: base}) == image_name(second, {BASE_REF: base})
    result = validate_task(first)
    assert (result.oracle_rewards, result.nop_rewards) == ((1.0,), (0.0,))
    solve = second.path / "solution" / "solve.sh"
    project = make_project(SERIES, 1)
    right, wrong = repr(project.fix.new), repr(project.near_misses[0].new)
    text = solve.read_text()
    assert right in text
    solve.write_text(text.replace(right, wrong))
    assert validate_task(load_task(second.path)).oracle_rewards == (0.0,)
