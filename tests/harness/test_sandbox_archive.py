"""Tars between host and container: nothing unsafe crosses over, and changes are seen."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from k3eval_harness.errors import SizeLimitExceeded
from k3eval_harness.sandbox.archive import check, extract, pack, read_single_file
from k3eval_harness.sandbox.treediff import diff_trees
from k3eval_harness.testing import tar_of


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def _tar(*members: tarfile.TarInfo) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    buffer.seek(0)
    return buffer


def _names(archive: io.BytesIO) -> list[str]:
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        return tar.getnames()


@pytest.mark.parametrize(
    "bad",
    [
        _member("/etc/passwd"),
        _member("app/../../etc/passwd"),
        _member("app/tty", tarfile.CHRTYPE),
        _member("app/disk", tarfile.BLKTYPE),
        _member("app/pipe", tarfile.FIFOTYPE),
        _member("app/soft/below"),
        _member("app/hard", tarfile.LNKTYPE, "/etc/shadow"),
        _member("app/hard", tarfile.LNKTYPE, "../etc/shadow"),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_what_must_not_cross_over_is_dropped(bad: tarfile.TarInfo) -> None:
    out = io.BytesIO()
    stats = check(_tar(_member("app/ok"), _member("app/soft", tarfile.SYMTYPE, "/etc"), bad), out, 1000)
    assert _names(out) == ["app/ok", "app/soft"]
    assert stats.dropped == (bad.name,)


def test_links_inside_the_tree_stay_and_setuid_goes() -> None:
    out = io.BytesIO()
    check(
        _tar(
            _member("app/file", mode=0o4755),
            _member("app/hard", tarfile.LNKTYPE, "app/file"),
            _member("app/soft", tarfile.SYMTYPE, "/anywhere"),
            _member("app/dir", tarfile.DIRTYPE, mode=0o2755),
        ),
        out,
        1000,
    )
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert [(item.name, oct(item.mode)) for item in tar if item.isreg() or item.isdir()] == [
            ("app/file", "0o755"),
            ("app/dir", "0o755"),
        ]
        assert tar.getnames() == ["app/file", "app/hard", "app/soft", "app/dir"]


@pytest.mark.parametrize("act", [check, lambda source, sink, limit: extract(source, Path(sink), limit)])
def test_size_limits(act: Callable[[io.BytesIO, object, int], object], tmp_path: Path) -> None:
    archive = tar_of({"app/a": b"x" * 600, "app/b": b"x" * 600})
    sink: object = io.BytesIO() if act is check else tmp_path / "out"
    with pytest.raises(SizeLimitExceeded):
        act(archive, sink, 1000)  # type: ignore[arg-type]  # the fake of a file is one


def test_extract_writes_regular_files_only_below_the_folder(tmp_path: Path) -> None:
    archive = _tar(
        _member("top/a"),
        _member("top/link", tarfile.SYMTYPE, "/etc/passwd"),
        _member("top/../../escape"),
        _member("top/sub/b"),
    )
    assert extract(archive, tmp_path / "out", 100) == ("a", "sub/b")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "out", "sub"]
    assert extract(tar_of({"one.txt": b"x"}), tmp_path / "file", 100) == ("",)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_pack_makes_everything_root_and_scripts_executable(tmp_path: Path) -> None:
    (tmp_path / "src" / "sub").mkdir(parents=True)
    (tmp_path / "src" / "test.sh").write_text("true")
    (tmp_path / "src" / "sub" / "x.pyc").write_text("")
    (tmp_path / "src" / "sub" / "secret").write_text("")
    (tmp_path / "src" / "sub" / "secret").chmod(0o600)
    out = io.BytesIO()
    pack(tmp_path / "src", out, "tests", ignore=("*.pyc",))
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        found = {item.name: (item.uid, item.mode & 0o555) for item in tar}
    assert found == {
        "tests": (0, 0o555),
        "tests/sub": (0, 0o555),
        "tests/sub/secret": (0, 0o444),
        "tests/test.sh": (0, 0o555),
    }


def test_a_single_file_is_read_and_anything_else_is_not() -> None:
    assert read_single_file(tar_of({"reward.txt": b"12345"}), 3) == b"123"
    assert read_single_file(_tar(_member("x", tarfile.SYMTYPE, "/etc/passwd")), 3) is None
    assert read_single_file(_tar(), 3) is None


def test_the_patch_shows_what_changed() -> None:
    before = tar_of(
        {
            "app/same": b"1\n",
            "app/edit.py": b"a\nb\n",
            "app/gone": b"x\n",
            "app/.git/HEAD": b"1",
            "app/bin": b"\xff",
        }
    )
    after = tar_of(
        {
            "app/same": b"1\n",
            "app/edit.py": b"a\nc",
            "app/new": b"n\n",
            "app/.git/HEAD": b"2",
            "app/bin": b"\xfe",
        }
    )
    diff = diff_trees(before, after)
    assert (diff.added, diff.removed, diff.changed) == (("new",), ("gone",), ("bin", "edit.py"))
    assert diff.patch == (
        "Binary or long files a/bin and b/bin differ\n"
        "--- a/edit.py\n+++ b/edit.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n"
        "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+n\n"
    )


def test_equal_trees_have_no_patch() -> None:
    assert diff_trees(tar_of({"app/a": b"1"}), tar_of({"app/a": b"1"})).patch == ""
