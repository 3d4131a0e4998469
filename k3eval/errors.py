"""The SDK's error tree. Every error names its cause class and, once a call was made, its request id.

K3EvalError                     cause
  ConfigError                   user       bad argument, missing key, unknown provider or price row
    SchemaError                 user       a tool schema that the host would refuse; nothing was sent
  ContextOverflowError          user       the prompt does not fit the model's context
  BudgetExceededError           budget     the call could break the budget; it was not sent
  ApiError                      provider   the host answered with an error (status, type, request id)
    BadRequestError             user       400, 404, 413, 422
    AuthenticationError         user       401, 403
    RateLimitError              provider   429 that a retry may cure
    QuotaExceededError          provider   429/402 that a retry cannot cure
    OverloadedError             provider   429/503/529: no capacity
    ServerError                 provider   5xx
    ContentFilterError          model      refused by the host's moderation
  TransportError                provider   no or broken reply (DNS, reset, time-out)
    StreamInterruptedError      provider   the stream ended before it was complete; holds the partial message
  ProtocolError                 provider   a reply that does not follow the wire format
  ToolArgumentsError            model      tool arguments that are not a JSON object
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from k3eval.redact import redact

if TYPE_CHECKING:
    from k3eval.messages import Message

Cause = Literal["model", "provider", "sandbox", "verifier", "harness", "user", "budget"]


class K3EvalError(Exception):
    """Base of every error that the SDK raises on purpose. The message never holds a key or an account id."""

    cause: ClassVar[Cause] = "provider"

    def __init__(self, message: str, *, request_id: str | None = None, request: str | None = None) -> None:
        self.message = redact(message)
        super().__init__(self.message)
        self.request_id = request_id
        self.request = None if request is None else redact(request)
        """The request in short, without keys and without content: ``POST host/path model=... messages=...``.
        """


class ConfigError(K3EvalError):
    """The caller's configuration cannot work: bad argument, missing key, unknown provider."""

    cause = "user"


class SchemaError(ConfigError):
    """A tool or answer schema that the host would refuse. Raised before anything is sent."""


class ContextOverflowError(K3EvalError):
    """The prompt does not fit the model's context, found before sending or by the host."""

    cause = "user"


class BudgetExceededError(K3EvalError):
    """The call could break the budget, so it was not sent."""

    cause = "budget"


class ApiError(K3EvalError):
    """The host answered with an error, perhaps inside an HTTP 200."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        host: str,
        type: str | None = None,  # noqa: A002 - the wire's own name for it
        request_id: str | None = None,
        request: str | None = None,
        retry_after_s: float | None = None,
        body: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, request=request)
        self.status = status
        """HTTP status; for an error inside a 200 the code that the body states."""
        self.host = host
        self.type = type
        """The host's own word for the error."""
        self.retry_after_s = retry_after_s
        """Seconds the host asks to wait, where it says so."""
        self.body = None if body is None else redact(body)
        """The start of the reply's body, redacted."""


class BadRequestError(ApiError):
    """The request is wrong: parameter, schema, unknown model, size."""

    cause = "user"


class AuthenticationError(ApiError):
    """The key is refused, or it may not do this."""

    cause = "user"


class RateLimitError(ApiError):
    """Too many requests or tokens for now; a later try may pass."""


class QuotaExceededError(ApiError):
    """The account's money or quota is used up; no retry cures that."""


class OverloadedError(ApiError):
    """The host has no capacity at the moment."""


class ServerError(ApiError):
    """The host failed."""


class ContentFilterError(ApiError):
    """The host's moderation refused the prompt or the answer."""

    cause = "model"


class TransportError(K3EvalError):
    """No reply, or a broken one: name look-up, connection, time-out."""


class StreamInterruptedError(TransportError):
    """The stream ended before it was complete. What it may have cost is unknown."""

    def __init__(
        self,
        message: str,
        *,
        partial: Message | None = None,
        request_id: str | None = None,
        request: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id, request=request)
        self.partial = partial
        """What had arrived."""


class ProtocolError(K3EvalError):
    """A reply that does not follow the wire format."""


class ToolArgumentsError(K3EvalError):
    """The model wrote tool arguments that are not a JSON object."""

    cause = "model"
