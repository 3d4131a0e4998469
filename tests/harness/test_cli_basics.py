"""The command line as a user meets it: light help, bad input is one clear line, every command has --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from k3eval_harness.cli.app import COMMAND_MODULES, app
from k3eval_harness.cli.doctor import torch_checks
from k3eval_local.kernels.native import build

HEAVY = ("torch", "docker", "pandas", "openai", "numpy", "scipy", "httpx", "rich", "k3eval_local")
CHECKOUT = Path(__file__).parents[2]
PATHS = [str(CHECKOUT), str(CHECKOUT / "harness"), str(CHECKOUT / "local_backend")]


def loaded_after(arguments: list[str]) -> set[str]:
    """Modules that a fresh interpreter holds after ``k3eval ARGUMENTS``."""
    code = (
        f"import sys, json; sys.path[:0] = {PATHS!r}; sys.argv = ['k3eval', *{arguments!r}]\n"
        "from k3eval_harness.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage: k3eval" in done.stdout
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize(
    "command",
    [
        "run --task repo-fix-mini --agent nop",
        "tasks generate",
        "tasks episodes",
        "bench decode",
        "report .",
        "model init --config a",
        "model logits a --ids x",
        "model convert a --to fp32",
    ],
)
def test_an_empty_out_is_refused_by_every_command(command: str, text: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--out", text])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--out" in done.stderr
    assert "a path is needed" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["tasks", "--help"], ["bench", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert not loaded_after(arguments) & set(HEAVY)


def test_every_command_is_there_and_has_json() -> None:
    runner = CliRunner()
    top = runner.invoke(app, ["--help"]).output
    assert {"run", "tasks", "bench", "report", "models", "doctor"} <= set(top.split())
    commands = ["run", "report", "models", "doctor", "bench decode"]
    commands += [f"tasks {name}" for name in ("list", "show", "check", "validate", "generate", "episodes")]
    for command in commands:
        assert "--json" in runner.invoke(app, [*command.split(), "--help"]).output, command
    assert set(COMMAND_MODULES) >= {"run", "tasks", "bench", "report", "models", "doctor"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("run --task no-such-task", "no task named 'no-such-task'"),
        ("run --task sqlparse-malformed --dry-run", "did you mean sqlparse-malformed-input"),
        ("run --task repo-fix --model gpt", "unknown model 'gpt'"),
        ("run --task repo-fix --model local/", "unknown model 'local/'"),
        ("run --task repo-fix --model local/nobody --dry-run", "no local model is called 'nobody'"),
        ("run --task repo-fix --model compatible/kimi-k3", "names no server"),
        ("run --task repo-fix --agent nobody --dry-run", "nobody"),
        ("run --task repo-fix --attempts 0", "--attempts must be 1 or more, not 0"),
        ("run --task repo-fix --attempts=-3", "--attempts must be 1 or more, not -3"),
        ("run --task repo-fix --concurrency 0", "--concurrency must be 1 or more"),
        ("run --task repo-fix --max-turns 0", "--max-turns must be 1 or more"),
        ("run --task repo-fix --max-cost nothing", "--max-cost must be a positive amount"),
        ("run --task repo-fix --max-cost=-1", "--max-cost must be a positive amount"),
        ("run --task repo-fix --max-cost inf", "--max-cost must be a positive amount"),
        ("run --task repo-fix --seed=-1", "--seed must be 0 or more"),
        ("run --task repo-fix --seed 9223372036854775808", "--seed must be 0 or more and below 2^63"),
        ("run --task repo-fix --timeout 0", "--timeout must be a positive number"),
        ("run --task repo-fix --timeout nan", "--timeout must be a positive number"),
        ("run --task repo-fix --threshold 2", "--threshold must lie between 0 and 1"),
        ("run --task repo-fix --min-coverage=-0.1", "--min-coverage must lie between 0 and 1"),
        ("run --task repo-fix --effort huge", "--effort must be one of"),
        ("run --task repo-fix --n 0", "--n must be 1 or more"),
        ("tasks show no-such-task", "no task named"),
        ("tasks show repo-fix", "give one"),
        (
            "tasks show mini-7-00003",
            "`k3eval tasks generate --seed 7 --n 4 --out DIR` makes DIR/mini-7-00003",
        ),
        ("run --task k3eval/mini-8-00000", "`k3eval tasks generate --seed 8 --n 1 --out DIR`"),
        ("tasks check no-such-task", "no task named"),
        ("tasks validate --repeat 0", "--repeat must be 1 or more"),
        ("report --format xml .", "--format must be one of md, json"),
        ("report no-such-folder", "no-such-folder"),
        ("--nonsense", "no such option: --nonsense (see `k3eval --help`)"),
        ("nonsense", "no such command 'nonsense' (see `k3eval --help`)"),
        ("run", "missing option '--task'"),
        ("run --task", "'--task' requires an argument"),
        ("run --nonsense", "no such option: --nonsense"),
        ("run --task x --n many", "invalid value for '--n'"),
        ("tasks lst", "Did you mean 'list'?"),
        ("tasks generate", "missing option '--out'"),
        ("bench decode --repeats x", "(see `k3eval bench decode --help`)"),
        ("report", "missing argument"),
        ("usage a b", "unexpected extra argument"),
        ("model convert x --to z --out y", "'z' is not one of 'fp32'"),
        ("model init --config a --out x --seed=-1", "greater than or equal to 0"),
        ("serve --nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_2(
    arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKOUT)
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert expected in lines[0]
    assert lines[0].startswith("k3eval: ")


@pytest.mark.parametrize("arguments", ["", "tasks", "bench", "model"])
def test_a_group_named_alone_shows_its_help(arguments: str) -> None:
    done = CliRunner().invoke(app, arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"k3eval {metadata.version('k3eval')}\n")


def test_ctrl_c_while_modules_load_is_exit_130_without_a_traceback() -> None:
    code = (
        f"import sys; sys.path[:0] = {PATHS!r}; sys.argv = ['k3eval', 'models']\n"
        "import os, signal, time\n"
        "class SlowTyper:\n"  # whatever is imported when the signal arrives
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT)\n                time.sleep(30)\n"
        "            except BaseException as error:\n                raise ImportError(str(error))\n"
        "sys.meta_path.insert(0, SlowTyper)\n"
        "from k3eval_harness.cli import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert len(done.stderr.splitlines()) <= 1


def test_a_malformed_task_is_named_with_file_and_key(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "task.toml").write_text("schema_version = '1.4'\n[agent]\ntimeout_sec = 'soon'\n")
    done = CliRunner().invoke(app, ["run", "--task", str(folder), "--agent", "oracle"])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "task.toml" in done.stderr
    assert "timeout_sec" in done.stderr


def test_a_terminal_in_ascii_is_no_reason_to_crash() -> None:
    code = f"import sys; sys.path[:0] = {PATHS!r}\nfrom k3eval_harness.cli import main\nmain()"
    for form in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "tasks", "show", "repo-fix/sqlparse-malformed-input", *form],
            cwd=CHECKOUT, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60,
            check=True,
        )  # fmt: skip
        assert done.stdout.isascii()


def test_a_warning_is_a_note_in_one_line() -> None:
    code = (
        f"import sys, warnings; sys.path[:0] = {PATHS!r}; sys.argv = ['k3eval', '--help']\n"
        "from k3eval_harness.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    warnings.warn('one\\ntwo', UserWarning, stacklevel=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "k3eval: note: one two\n"


def test_models_lists_local_ones_with_sizes_and_priced_ones_with_dates() -> None:
    done = CliRunner().invoke(app, ["models", "--json"])
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    local = {row["model"]: row for row in data["local"]}
    assert local["local/a"]["parameters"] > local["local/a"]["active_parameters"] > 100_000
    assert local["local/a-mla"]["kda_layers"] == 0
    priced = [row for row in data["priced"] if row["model"] == "moonshot/kimi-k3"]
    assert [(row["input"], row["output"], row["currency"]) for row in priced] == [("3.00", "15.00", "USD")]
    assert all(row["checked_on"] for row in data["priced"])
    table = CliRunner().invoke(app, ["models"]).output
    assert "local/a" in table
    assert "openrouter/moonshotai/kimi-k3" in table


def test_models_needs_no_torch() -> None:
    code = (
        f"import sys; sys.path[:0] = {PATHS!r}; sys.modules['torch'] = None\n"
        "from k3eval_harness.cli.models import local_models\nprint(len(local_models()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) >= 8


@pytest.mark.filterwarnings(
    # the docker package leaves a socket open when its constructor fails
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_doctor_never_shows_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONSHOT_API_KEY", "sk-very-secret-value")
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert "secret" not in done.output
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["key for moonshot"]["detail"] == "present in MOONSHOT_API_KEY"
    assert checks["key for openrouter"]["status"] == "note"
    assert checks["engine"]["status"] == "missing"
    assert "torch" in checks["local backend"]["detail"]
    assert checks["native step"]["status"] in ("ok", "note")
    assert done.exit_code == 3
    assert done.stderr.strip() == "k3eval: needed and missing: engine"


def test_doctor_says_why_there_is_no_native_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise build.NativeUnavailable("no C compiler (cc) on PATH")

    monkeypatch.setattr(build, "load", load)
    (found,) = [check for check in torch_checks() if check.name == "native step"]
    assert found.status == "note"
    assert found.detail.startswith("no C compiler (cc) on PATH; local models run on plain torch")


@pytest.mark.docker
def test_doctor_finds_the_engine() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["engine"]["status"] == "ok"
    assert "GiB free" in checks["disk"]["detail"]
