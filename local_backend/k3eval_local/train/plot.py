"""Draw a training log as one SVG: ``python -m k3eval_local.train.plot LOG.jsonl OUT.svg``.

Two panels over the tokens seen: the loss of written tokens (log scale) and the replay pass rate.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_WIDTH, _HEIGHT, _LEFT, _GAP = 640, 200, 60, 50

Point = tuple[float, float]


def series(lines: Sequence[str], key: str) -> list[Point]:
    """(million tokens, value) of every log entry that has ``key``."""
    entries = [json.loads(line) for line in lines if line.strip()]
    return [(entry["tokens"] / 1e6, float(entry[key])) for entry in entries if key in entry]


def draw(lines: Sequence[str]) -> str:
    """The SVG text; raises ValueError when the log holds no step."""
    loss, held_out = series(lines, "loss"), series(lines, "held_out_loss")
    rate = series(lines, "replay_pass_rate")
    if not loss:
        raise ValueError("the log holds no training step")
    most = max(x for x, _ in loss)
    ticks = [10.0**power for power in range(-3, 2)]
    values = [y for _, y in loss + held_out if y > 0]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def log_place(value: float) -> float:
        return (math.log10(max(value, 1e-6)) - low) / (high - low)

    shown = [tick for tick in ticks if low <= math.log10(tick) <= high]
    parts = _panel(0, "loss: batches (grey), held out (black)", most, shown, log_place)
    parts += [_line(0, loss, most, log_place, "#aaa"), _line(0, held_out, most, log_place, "#000")]
    top = _HEIGHT + _GAP
    parts += _panel(top, "replay pass rate, held-out conversations", most, [0.0, 0.5, 1.0], lambda y: y)
    parts.append(_line(top, rate, most, lambda y: y, "#000"))
    height = 2 * (_HEIGHT + _GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
    return head + 'font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"


def _place(top: int, point: Point, most: float, vertical: Callable[[float], float]) -> str:
    x = _LEFT + point[0] / most * _WIDTH
    return f"{x:.1f},{top + 20 + (1 - vertical(point[1])) * (_HEIGHT - 20):.1f}"


def _line(
    top: int, points: Sequence[Point], most: float, vertical: Callable[[float], float], colour: str
) -> str:
    places = " ".join(_place(top, point, most, vertical) for point in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}"/>'


def _panel(
    top: int, title: str, most: float, ticks: Sequence[float], vertical: Callable[[float], float]
) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="{top + 14}">{title}</text>']
    for tick in ticks:
        y = top + 20 + (1 - vertical(tick)) * (_HEIGHT - 20)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    bottom = top + _HEIGHT + 16
    parts.append(f'<text x="{_LEFT}" y="{bottom}">0</text>')
    label = f"{most:.2f} million tokens"
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom}" text-anchor="end">{label}</text>')
    return parts


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m k3eval_local.train.plot LOG.jsonl OUT.svg")
    Path(sys.argv[2]).write_text(
        draw(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()), encoding="utf-8"
    )
