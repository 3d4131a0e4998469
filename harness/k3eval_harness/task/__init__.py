"""Tasks in Harbor's format: reader, linter, importers, generators."""

from __future__ import annotations

from k3eval_harness.task.find import default_roots, find_tasks
from k3eval_harness.task.lint import lint_task, unsupported
from k3eval_harness.task.load import Finding, Task, load_task

__all__ = ["Finding", "Task", "default_roots", "find_tasks", "lint_task", "load_task", "unsupported"]
