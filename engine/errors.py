"""What an engine can do, and the errors by which it says that it cannot. `engine.api` has all of it."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """What an engine can do; a request that needs what is missing is refused by this name."""

    TOKENS_IN = "tokens_in"
    TEXT_IN = "text_in"
    TOKENS_OUT = "tokens_out"
    PAUSE = "pause"  # a choice whose reader is slow waits without holding up the others
    ATOMIC_ADMISSION = "atomic_admission"
    RELEASE_CONFIRMED = "release_confirmed"  # leaving `submit` means that the memory is free again
    BITWISE = "bitwise"  # the same bits whatever else runs
    CONSTRAINTS = "constraints"
    PROMPT_LOGPROBS = "prompt_logprobs"
    EMBEDDINGS = "embeddings"
    SHARED_PROMPT = "shared_prompt"  # the prompt of n choices is computed once, not n times
    KV_TRANSFER = "kv_transfer"  # keys and values of a prompt go to another machine, or come from one


class EngineError(Exception):
    """Base of all errors that an engine raises on purpose; `str()` is fit for a client."""


class EngineOverloaded(EngineError):
    """The queue has no room for all choices of the batch. retry_after: seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineNotReady(EngineError):
    """The engine is loading or draining. retry_after: seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTooLarge(EngineError):
    """This request could never run, however idle the engine is. param: the field to blame, as the client knows it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class InvalidConstraint(EngineError):
    """A constraint does not compile. param: the field that holds it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class RequestRejected(EngineError):
    """A server that the request was passed on to refuses it for good. param, code: as it says."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnsupportedByEngine(EngineError):
    """The engine lacks a capability that the request needs."""

    def __init__(self, capability: Capability) -> None:
        super().__init__(f"this engine does not support {capability.value}")
        self.capability = capability


class EngineDead(EngineError):
    """The engine's thread has died; every open stream raises this."""


class ChoiceFailed(EngineError):
    """One choice could not go on (such as non-finite logits); its siblings are unharmed."""


class EmbeddingFailed(EngineError):
    """An input's vector could not be computed; other requests are unharmed."""
