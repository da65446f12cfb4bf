"""Helpers of the tests of constraints: a random model over bytes, and the judge of what it makes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache
from typing import Any

import torch
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import extend
from llguidance import LLTokenizer

from engine.api import Constraint, JsonSchema, SamplingParams
from engine.core import EngineCore
from engine.grammar import GrammarCompiler
from engine.matchers import Matcher
from engine.plan import SampledToken, StepPlan
from engine.sampler import sample
from engine.sequence import Prefill, Sequence
from tests.engine.families import byte_tokenizer
from tests.engine.support import CheckingRunner, next_token, prefill_of

VOCAB_SIZE = 331  # more than the tokenizer knows, and no multiple of 32
EOS = 2


@cache
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer().backend_tokenizer.to_str()
    return GrammarCompiler(LLTokenizer(tokenizer, n_vocab=VOCAB_SIZE, eos_token=[EOS]), [EOS])


@cache
def token_texts() -> tuple[bytes, ...]:
    tokenizer = LLTokenizer(byte_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    return tuple(tokenizer.decode_bytes([token_id]) for token_id in range(VOCAB_SIZE))


def text_of(sequence: Sequence) -> bytes:
    return b"".join(token_texts()[token_id] for token_id in sequence.output_ids if token_id != EOS)


@dataclass
class RandomRunner(CheckingRunner):
    """Draws with the real sampler from logits that are random in the row's whole context.

    Values come to an end because what closes them has a better chance.
    """

    vocab_size: int = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset({EOS})
    closing: float = 4.0
    num_steps: int = field(default=0)

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        super().execute(plan)
        if not plan.logit_rows:
            return []
        rows = []
        for row in plan.logit_rows:
            context = self.context(plan.segments, row, plan.positions[row])
            generator = torch.Generator().manual_seed(next_token(context) * 1009 + len(context))
            rows.append(torch.randn(self.vocab_size, generator=generator))
        logits = torch.stack(rows)
        logits[:, [EOS, *(token_texts().index(text) for text in (b'"', b"}", b"]"))]] += self.closing
        return sample(logits, plan.sampling_rows)


def constrained(constraint: Constraint | None, seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, constraint=constraint, **{"max_tokens": 200, **options})


def accepts(matcher: Matcher, text: str) -> bool:
    matcher = matcher.fork()
    tokens = [token_texts().index(bytes([byte])) for byte in text.encode()]
    return all(matcher.accept(token) for token in tokens) and matcher.accept(EOS)


def schema_of(schema: object) -> JsonSchema:
    return JsonSchema(json.dumps(schema), "response_format")


def prefill_for(prompt: list[int], choices: list[SamplingParams]) -> Prefill:
    """As EngineThread makes them: a matcher for each choice that is constrained."""
    prefill = prefill_of(prompt, choices)
    for sequence in prefill.sequences:
        if sequence.params.constraint is not None:
            sequence.matcher = compiler().compile(sequence.params.constraint).fork()
    return prefill


@dataclass(frozen=True)
class Outcome:
    text: bytes
    reason: str
    error: str | None


def run(core: EngineCore, prefills: list[Prefill]) -> list[list[Outcome]]:
    """How every choice of every prompt ended, all admitted at once."""
    groups = [list(prefill.sequences) for prefill in prefills]
    ends: dict[int, Any] = {}
    core.add(prefills)
    while core.has_work:
        for sequence, update in core.step() or ():
            if update.end_reason is not None:
                ends[sequence.id] = update
        core.cache.check()
    return [[Outcome(text_of(s), str(ends[s.id].end_reason), ends[s.id].error) for s in group] for group in groups]


def violations(schema: object, text: bytes) -> list[str]:
    """What a validator that computes exactly has against a JSON text."""
    try:
        value = json.loads(text.decode(), parse_float=Decimal)
    except InvalidOperation:  # an exponent that Decimal has no room for; JSON does not limit it
        value = json.loads(text.decode())
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    with localcontext(prec=1000):
        return [error.message for error in _Validator(exact, format_checker=_FORMATS).iter_errors(value)]


def _is_integer(_: object, value: object) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


_Validator: Any = extend(
    Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)
_FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
