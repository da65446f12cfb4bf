"""The contract between the service and any engine. Imports no torch.

A `Request` is one prompt with n choices. `Engine.submit` admits a batch of them whole or not at all; each admitted
choice is a `ChoiceStream`. What leaves the `async with` is aborted, and its memory handed back.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from anyio.abc import TaskStatus

from engine.constraints import (
    Choice,
    Constraint,
    JsonBlock,
    JsonBlocks,
    JsonObject,
    JsonSchema,
    Lark,
    OnlyTokens,
    OpenConstraint,
    Regex,
    TriggeredBlocks,
    WithoutWords,
)
from engine.errors import (
    Capability,
    ChoiceFailed,
    EmbeddingFailed,
    EngineDead,
    EngineError,
    EngineNotReady,
    EngineOverloaded,
    InvalidConstraint,
    RequestRejected,
    RequestTooLarge,
    UnsupportedByEngine,
)
from engine.stats import EngineStats

__all__ = [
    "CallDelta",
    "Capability",
    "ChatPrompt",
    "Choice",
    "ChoiceFailed",
    "ChoiceStream",
    "ChoiceUpdate",
    "Constraint",
    "EmbedRequest",
    "Embedding",
    "EmbeddingFailed",
    "EmbeddingInfo",
    "EndReason",
    "Engine",
    "EngineDead",
    "EngineError",
    "EngineHealth",
    "EngineInfo",
    "EngineNotReady",
    "EngineOverloaded",
    "EngineState",
    "InvalidConstraint",
    "JsonBlock",
    "JsonBlocks",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "OnlyTokens",
    "OpenConstraint",
    "Prompt",
    "PromptInfo",
    "Regex",
    "Request",
    "RequestRejected",
    "RequestTooLarge",
    "SamplingParams",
    "StepRecord",
    "Submission",
    "TextDelta",
    "TextLogprobs",
    "TextPrompt",
    "TokenLogprobs",
    "TokenPrompt",
    "TriggeredBlocks",
    "UnsupportedByEngine",
    "UpstreamHealth",
    "WithoutWords",
]


class EndReason(StrEnum):
    """Why a choice ended. The only such enum: OpenAI's `finish_reason` is derived from it by the presenters."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """messages: as OpenAI writes them."""

    messages: tuple[Mapping[str, object], ...]


Prompt = TokenPrompt | TextPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice is drawn. Ranges are checked by the service; a seed is always given.

    temperature 0 is greedy. top_k 0 keeps all. top_p and min_p are probabilities in [0, 1]; top_p 0 keeps the likeliest
    token alone. seed: [0, 2**64). max_tokens: None for up to the context's end; 0 draws nothing. min_tokens: no stop
    token is drawn before so many. logit_bias: (token id, bias) pairs. logprobs: None for none, k for the chosen token's
    and the k best. constraint: needs Capability.CONSTRAINTS; where its text can only end, the choice does, whatever
    ignore_eos and min_tokens say.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its n choices (`choices[i]` is how choice i is drawn).

    priority: lower runs first. owner: who shares the engine fairly with other owners. cache_namespace: prefixes are
    shared within one namespace only. prompt_logprobs: None for none, k for those of the prompt's tokens and of the k
    best in their places; such a prompt is computed whole, whatever the cache has. checked: what has to compile although
    no choice is held to it, on engines that have constraints. kv_transfer_params: where keys and values are to come
    from or to go to, in the words of the engine's connector; needs Capability.KV_TRANSFER.
    sent: fields as the client sent them, for engines that pass requests on; they go before what the parameters say.
    own_names: what the client calls fields that go on under other names, by those.
    """

    model: str
    prompt: Prompt
    choices: tuple[SamplingParams, ...]
    priority: int = 0
    owner: str = ""
    cache_namespace: str = ""
    prompt_logprobs: int | None = None
    checked: tuple[Constraint, ...] = ()
    kv_transfer_params: dict[str, object] | None = None
    sent: Mapping[str, object] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms, finite. top: (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """TokenLogprobs of an engine that tells no ids: tokens by their exact bytes."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is added to a call. index: 0, 1, ... over the calls of a choice. id, name: with a call's first delta only.
    arguments: they concatenate to JSON text.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What an update of an engine without `tokens_out` has beside its text, which is content then.

    num_tokens: a guess until the last update, which may take some back so that the sum is what the engine says.
    """

    num_tokens: int = 0
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[TextLogprobs, ...] = ()
    num_reasoning_tokens: int = 0


@dataclass(slots=True)  # one a token, and a frozen one takes four times as long to make
class ChoiceUpdate:
    """What one engine step made for one choice. Nobody changes it.

    Engines with `tokens_out` fill token_ids, others text and delta. The last update of a choice, and no other, has an
    end_reason; it may carry tokens as well. stop_reason: the stop token id that ended it, None for end of sequence;
    such a token is the last of token_ids and is not text. error: message for the client when end_reason is ERROR;
    cause: what the client is told instead, where a failed choice is not all there is to it. kv_transfer_params: on the
    last one, what an engine with KV_TRANSFER says of where its keys and values are.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    end_reason: EndReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    kv_transfer_params: dict[str, object] | None = None
    delta: TextDelta | None = None
    cause: EngineError | None = None


class ChoiceStream(Protocol):
    """One choice as it is made: iterate to its last update; then the iteration ends.

    Iterating raises EngineDead when the engine dies, EngineNotReady when it is stopped. `abort` and `aclose` are
    idempotent and never block on the engine.
    """

    def __aiter__(self) -> AsyncIterator[ChoiceUpdate]: ...

    async def __anext__(self) -> ChoiceUpdate: ...

    def receive_nowait(self) -> ChoiceUpdate | None:
        """The next update that is already here, or None."""
        ...

    def abort(self, reason: EndReason) -> None:
        """Stop this choice; its last update is still delivered, with `reason` unless it had ended by itself."""
        ...

    async def aclose(self) -> None:
        """Stop this choice and discard what is left of it."""
        ...


@dataclass(slots=True)
class PromptInfo:
    """Facts about one admitted prompt; num_cached_tokens is final once its first update has arrived.

    logprobs: where asked for, complete once the first update has arrived (unless that has the end_reason of one that
    was cut off): of each token but the first, which nothing precedes; None where the model gave no finite numbers.
    num_tokens: None until the engine knows it (engines that tokenise themselves). started_at: when the engine began
    with it, in seconds of time.monotonic(); None while it waits, or from an engine that does not say.
    """

    num_tokens: int | None
    num_cached_tokens: int = 0
    started_at: float | None = None
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    extras: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submission:
    """An admitted batch. prompts: one per Request. choices: flat, index = prompt * n + choice."""

    prompts: Sequence[PromptInfo]
    choices: Sequence[ChoiceStream]


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """One input as the embedding model gets it, its special tokens included.

    dimensions: of the vector's, only the first so many, scaled as the model's own vectors are; None for all. owner: who
    shares the engine fairly with other owners.
    """

    token_ids: tuple[int, ...]
    dimensions: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """values: of type "f", four bytes each."""

    values: array[float]


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """The embedding model. What is known before it is loaded is its name; the rest is then 0 or empty.

    max_model_len: tokens of one input. dimensions: of its vectors. smaller_dimensions: other numbers that a request may
    ask for. model_path: the folder of its tokenizer, None for an engine that needs none. prefix: what the model wants
    before every text. lower_case: it wants texts in lower case, and its tokenizer does not see to it.
    """

    model: str
    max_model_len: int = 0
    dimensions: int = 0
    smaller_dimensions: Sequence[int] = ()
    vocab_size: int = 0
    model_path: str | None = None
    prefix: str = ""
    lower_case: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is served. Known before the model is loaded except model facts, which are then 0 or empty.

    vocab_size is the number of logits; eos_token_ids end a choice unless it ignores them. backend: such as "torch cpu
    bfloat16". model_path: the local folder whose tokenizer belongs to the model, None for an engine that needs none.
    embedding: the model that `embed` is served by; None without Capability.EMBEDDINGS.
    """

    model: str
    backend: str
    capabilities: frozenset[Capability]
    max_model_len: int = 0
    max_num_seqs: int = 0
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    model_path: str | None = None
    embedding: EmbeddingInfo | None = None


@dataclass(frozen=True, slots=True)
class UpstreamHealth:
    """One of the servers that requests are passed on to. name: host and port. is_up: it answers, and has the model.
    is_open: its circuit is, so that it gets nothing for a while. num_choices: of ours that it has now. requests: those
    that have ended, by what came of them.
    """

    name: str
    is_up: bool
    is_open: bool
    num_choices: int
    requests: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Answered without the engine, at any time.

    reason: why the state is not READY. last_step_age: seconds since the engine last made progress while it has work,
    None while it has none. pages_*: KV pages; free + cached + held is the pool. prefix_tokens_*: of prompts as they
    began, and those of them that the cache had. *draft_tokens: guessed, and those of them that came true.
    num_embedding_inputs: admitted and not computed yet. embedding_tokens: computed. upstreams: of an engine that has
    such. stats: not of this moment but the engine's own, which go on counting.
    """

    state: EngineState
    reason: str | None = None
    last_step_age: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_tokens_looked_up: int = 0
    prefix_tokens_found: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    num_embedding_inputs: int = 0
    embedding_tokens: int = 0
    upstreams: tuple[UpstreamHealth, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, for people who want to see why a request was slow.

    segment_rows: how many rows attended to each KV segment (a prompt shared by n choices shows as n).
    """

    number: int
    seconds: float
    num_decode_rows: int
    num_prefill_rows: int
    segment_rows: tuple[int, ...]
    num_running: int
    num_waiting: int


class Engine(Protocol):
    """EngineThread (torch, native), VllmEngine, UpstreamEngine, FakeEngine; one contract suite runs over them all."""

    @property
    def info(self) -> EngineInfo: ...

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Host the engine until `stop()`. `started()` is called at once; loading goes on behind it (see `health`).

        Raises EngineDead (after failing every open stream) when loading or a step fails for good.
        """
        ...

    async def wait_ready(self) -> None:
        """Return once the model is loaded (`info` is complete then); raises EngineDead when that failed."""
        ...

    def drain(self) -> None:
        """Refuse new batches from now on (EngineNotReady); what is admitted goes on."""
        ...

    def stop(self) -> None:
        """End `run` soon; open streams raise EngineNotReady, since their answers are not complete."""
        ...

    def submit(self, batch: Sequence[Request]) -> AbstractAsyncContextManager[Submission]:
        """Admit all choices of all requests, or raise EngineNotReady, EngineOverloaded, RequestTooLarge, EngineDead,
        InvalidConstraint, RequestRejected, UnsupportedByEngine.

        Leaving the context aborts what is left and waits, for a bounded time, until the engine has let go.
        """
        ...

    async def embed(self, batch: Sequence[EmbedRequest]) -> Sequence[Embedding]:
        """The vectors of all inputs, in their order. All are admitted or none; being cancelled here drops those that
        are not computed yet.

        Raises EngineNotReady, EngineOverloaded, RequestTooLarge, EngineDead, EmbeddingFailed, UnsupportedByEngine.
        """
        ...

    def health(self) -> EngineHealth: ...

    def last_steps(self) -> Sequence[StepRecord]:
        """The most recent steps, oldest first; empty from an engine that does not step by itself."""
        ...
