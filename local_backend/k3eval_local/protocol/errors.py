"""What can be wrong with a request, in one vocabulary; each dialect gives it a status and an envelope.

ProtocolError is raised anywhere between the socket and the engine and carries a kind, one line that says
what is wrong and what to do, and what a dialect may need besides (the member at fault, seconds to wait).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

_LONGEST = 1000


class ErrorKind(Enum):
    """Everything that a dialect must be able to say no with."""

    BAD_JSON = auto()
    BAD_REQUEST = auto()
    KEY_MISSING = auto()
    KEY_WRONG = auto()
    UNKNOWN_MODEL = auto()
    UNKNOWN_PATH = auto()
    WRONG_METHOD = auto()
    NO_ENDPOINT = auto()
    NOT_FOUND = auto()
    TOO_LARGE = auto()
    CONTEXT = auto()
    RATE = auto()
    CONCURRENCY = auto()
    QUOTA = auto()
    BUDGET_IN_USE = auto()
    WRAPPED_QUOTA = auto()
    OVERLOADED = auto()
    SERVER = auto()
    BAD_GATEWAY = auto()
    UNAVAILABLE = auto()
    TIMEOUT = auto()


@dataclass(eq=False)
class ProtocolError(Exception):
    """A request that is refused, or a generation that failed."""

    kind: ErrorKind
    message: str
    param: str | None = None
    """The request member at fault."""
    retry_after_s: int | None = None
    limit: int | None = None
    """The limit that was passed: context tokens, or requests or tokens in a window."""
    requested: int | None = None
    """What was asked for, in the limit's unit."""

    def __post_init__(self) -> None:
        # what the client sent may be part of the message: keep it one line of bounded length
        self.message = " ".join(self.message.split())[:_LONGEST]

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None) -> ProtocolError:
    """The commonest refusal: a member has a value that cannot be used."""
    return ProtocolError(ErrorKind.BAD_REQUEST, message, param)
