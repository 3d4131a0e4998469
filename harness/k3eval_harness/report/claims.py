"""What vendors publish about decode speed: shown beside measurements, marked as claims, never mixed in.

Each row says under which condition it was published. Nothing here was measured by k3eval.
"""

from __future__ import annotations

from k3eval_harness.results.schema import Record


class Claim(Record):
    """One published figure."""

    statement: str
    condition: str
    source: str
    read_on: str


CLAIMS = (
    Claim(
        statement="Kimi Linear (48B, 3 KDA layers to 1 MLA): up to 6.3x the decode throughput of MLA alone",
        condition="1M context; each model at the batch size that its freed cache memory allows",
        source="Kimi Linear technical report, arXiv 2510.26692",
        read_on="2026-12-01",
    ),
    Claim(
        statement="Kimi K3: 112 tokens/s at batch 1 (8.56 ms per token)",
        condition="8x B300, tensor parallel 8, no speculation, 8k prompt, 1k output",
        source="SGLang pull request 32890",
        read_on="2026-12-01",
    ),
)
