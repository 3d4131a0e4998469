"""Reading and writing files in the sandbox as the agent's user, through a shell of the harness's own.

The agent's shell is not used: its state (``set -e``, aliases) must not break the tools, nor theirs its.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import shlex
from typing import Final

from k3eval_harness.sandbox.protocol import Shell

FILE_LIMIT: Final = 4 * 1024**2
FILE_SECONDS: Final = 60.0
_OUTPUT_BYTES: Final = 3 * FILE_LIMIT

_REASONS: Final = {
    3: "no such file",
    4: "it is not a regular file",
    5: "permission denied",
    6: f"it is larger than {FILE_LIMIT // 1024**2} MiB",
    7: "the folder cannot be made",
}


class FileProblem(Exception):
    """A file that cannot be read or written; the text goes back to the model."""


def absolute(path: str, cwd: str) -> str:
    """``path`` seen from ``cwd``."""
    return posixpath.normpath(posixpath.join(cwd, path))


def read_bytes(shell: Shell, path: str) -> bytes:
    """Content of the regular file at the absolute ``path``. Raises FileProblem."""
    file = shlex.quote(path)
    output = _run(
        shell,
        path,
        f"( [ -e {file} ] || exit 3; [ -f {file} ] || exit 4; [ -r {file} ] || exit 5; "
        f'[ "$(wc -c < {file})" -le {FILE_LIMIT} ] || exit 6; base64 < {file} )',
    )
    try:
        return base64.b64decode(output)
    except binascii.Error as error:
        raise FileProblem(f"{path}: it cannot be read") from error


def exists(shell: Shell, path: str) -> bool:
    """Whether anything is at the absolute ``path``."""
    return shell.run(f"[ -e {shlex.quote(path)} ]", timeout_s=FILE_SECONDS).exit_code == 0


def write_bytes(shell: Shell, path: str, content: bytes) -> None:
    """Write the file at the absolute ``path``, with its folders; owner and mode stay. Raises FileProblem."""
    if len(content) > FILE_LIMIT:
        raise FileProblem(f"{path}: {_REASONS[6]}")
    file, folder = shlex.quote(path), shlex.quote(posixpath.dirname(path))
    encoded = base64.b64encode(content).decode()
    _run(
        shell,
        path,
        f"( mkdir -p -- {folder} 2>/dev/null || exit 7; [ ! -e {file} ] || [ -f {file} ] || exit 4; "
        f"{{ printf %s {encoded} | base64 -d > {file}; }} 2>/dev/null || exit 5 )",
    )


def _run(shell: Shell, path: str, command: str) -> bytes:
    result = shell.run(command, timeout_s=FILE_SECONDS, output_limit=_OUTPUT_BYTES)
    if result.exit_code:
        raise FileProblem(f"{path}: {_REASONS.get(result.exit_code, 'it cannot be read or written')}")
    if result.exit_code is None:
        raise FileProblem(f"{path}: the file operation was killed")
    return result.output
