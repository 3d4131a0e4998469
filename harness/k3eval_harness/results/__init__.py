"""Result schema, folder layout, trajectories, data frames."""

from __future__ import annotations

from k3eval_harness.results.layout import JobLayout, TrialLayout
from k3eval_harness.results.load import LoadedJob, load_job

__all__ = ["JobLayout", "LoadedJob", "TrialLayout", "load_job"]
