"""The harness's error tree. Each class has one cause; a trial that ends in one is void with that cause.

HarnessError            harness
UsageError            user       unknown task, model or agent; bad option
TaskError             user       a task that cannot be read or breaks its format
EngineUnavailable     sandbox    no Docker engine answers
ImageBuildError       sandbox    an image cannot be built or made
SandboxError          sandbox    the container failed, not the agent in it
SizeLimitExceeded   sandbox    what was copied out is larger than allowed
VerifierError         verifier   grading gave no usable verdict
AgentError            harness    the agent's own code failed
ModelServerError      provider   the model server that the run started is gone
BudgetError           budget     the job's money, token or time limit is reached
Cancelled             user       Ctrl-C or SIGTERM
"""

from __future__ import annotations

from typing import ClassVar

from k3eval.errors import Cause


class HarnessError(Exception):
    """Base of every error that the harness raises on purpose. The message says what to do."""

    cause: ClassVar[Cause] = "harness"

    def __init__(self, message: str, *, trial_id: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.trial_id = trial_id
        self.detail = detail
        """Longer evidence (a build log's tail), shown on request and kept in the result."""


class UsageError(HarnessError):
    """The command line or the configuration asks for something that does not exist."""

    cause = "user"


class TaskError(HarnessError):
    """A task folder that cannot be read or breaks Harbor's format."""

    cause = "user"


class EngineUnavailable(HarnessError):
    """No Docker engine answers."""

    cause = "sandbox"


class ImageBuildError(HarnessError):
    """An image cannot be pulled, made or built."""

    cause = "sandbox"


class SandboxError(HarnessError):
    """The container failed, as opposed to a command inside it."""

    cause = "sandbox"


class SizeLimitExceeded(SandboxError):
    """What was to be copied out of a container is larger than allowed."""


class VerifierError(HarnessError):
    """Grading gave no usable verdict."""

    cause = "verifier"


class AgentError(HarnessError):
    """The agent's own code failed."""


class ModelServerError(HarnessError):
    """The model server that the run itself started ended before the run."""

    cause = "provider"


class BudgetError(HarnessError):
    """A limit of the job on money, tokens or time is reached."""

    cause = "budget"


class Cancelled(HarnessError):
    """The user stopped the job."""

    cause = "user"
