"""Token usage of one call as disjoint counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call. The fields are disjoint; every sum is a property.

    Invariant: ``prompt == miss + (cache_read or 0) + (cache_write or 0)`` and
    ``output == output_text + (output_reasoning or 0)``. ``None`` means that the provider did not
    report the figure, which is not the same as zero: the tokens are then counted in ``miss`` or in
    ``output_text``.
    """

    miss: int
    """Prompt tokens computed anew and not written to a priced cache."""
    cache_read: int | None
    """Prompt tokens served from the prefix cache."""
    cache_write: int | None
    """Prompt tokens computed anew and written to a priced cache."""
    output_text: int
    """Generated tokens outside the reasoning channel (all of them when the split is unknown)."""
    output_reasoning: int | None
    """Generated tokens of the reasoning channel."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"usage counter {name} is negative: {value}")

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.miss + (self.cache_read or 0) + (self.cache_write or 0)

    @property
    def output(self) -> int:
        """All generated tokens."""
        return self.output_text + (self.output_reasoning or 0)

    @property
    def total(self) -> int:
        """Prompt plus output."""
        return self.prompt + self.output
