"""The SDK's error tree. Every error names its cause class and, once a call was made, its request id.

K3EvalError                     cause
ConfigError                   user       bad argument, missing key, unknown provider or price row
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

from typing import ClassVar, Literal

Cause = Literal["model", "provider", "sandbox", "verifier", "harness", "user", "budget"]


class K3EvalError(Exception):
    """Base of every error that the SDK raises on purpose."""

    cause: ClassVar[Cause] = "provider"

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class ConfigError(K3EvalError):
    """The caller's configuration cannot work: bad argument, missing key, unknown provider."""

    cause = "user"
