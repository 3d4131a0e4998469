"""The task family ``repo-fix-mini``: small Python projects with one seeded bug, made from a seed.

For the command line:

    generate(count, seed, out, *, shape=None, progress=None) -> tuple[Path, ...]      task folders
    write_episodes(count, seed, out, *, start=0, shape=TRAINING) -> int               conversations, JSONL;
                                                                  SHAPES names distributions to measure on
"""

from k3eval_harness.task.mini.episodes import SHAPES, TRAINING, EpisodeShape, episodes, write_episodes
from k3eval_harness.task.mini.folder import FAMILY, generate, task_files, task_name
from k3eval_harness.task.mini.functions import KINDS
from k3eval_harness.task.mini.noise import NoiseShape
from k3eval_harness.task.mini.project import MiniProject, Shape, make_project

__all__ = [
    "FAMILY",
    "KINDS",
    "SHAPES",
    "TRAINING",
    "EpisodeShape",
    "MiniProject",
    "NoiseShape",
    "Shape",
    "episodes",
    "generate",
    "make_project",
    "task_files",
    "task_name",
    "write_episodes",
]
