"""Constrained choices on a random model: what ends is valid, what is cut says so, and nobody else notices."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.api import (
    Choice,
    Constraint,
    InvalidConstraint,
    JsonBlock,
    JsonBlocks,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    TriggeredBlocks,
)
from engine.grammar import load_compiler
from engine.plan import SampledToken, StepPlan
from tests.engine.constrained import (
    EOS,
    VOCAB_SIZE,
    Outcome,
    RandomRunner,
    accepts,
    compiler,
    constrained,
    prefill_for,
    run,
    schema_of,
    token_texts,
    violations,
)
from tests.engine.families import byte_tokenizer, save_family
from tests.engine.support import core_with
from tests.service.tiny_tokenizers import byte_level, sentencepiece

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

SCHEMAS: list[object] = [
    {},
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"type": "string", "pattern": "b", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4", "maxLength": 9},
    {"type": "string", "format": "email", "maxLength": 20},
    {"type": "integer", "minimum": -5, "maximum": 20000000000},
    {"type": "integer", "maximum": 2e10},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 1000},
    {"type": "number", "minimum": 0.25, "maximum": 0.5},
    {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 5},
    {"type": "integer", "maximum": 9223372036854775807},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "boolean"},
    {"const": {"a": [1, "x"]}},
    {"const": 'quote " back\\slash \n é \u2028'},
    {"enum": [1, "a", None, {"a": [1]}, 0.5, 1e-7]},
    {"enum": ["abc", "a"], "maxLength": 2},
    PERSON,
    {"required": ["x"], "properties": {}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 1},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False, "minItems": 2},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
            "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        },
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"a": {"maximum": 9}}}]},
    {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
    {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "integer", "title": "T", "default": 3}}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "null", "description": "nothing", "x-order": 1},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_what_ends_is_valid_and_what_is_cut_is_length(schema: object) -> None:
    choices = [constrained(schema_of(schema), seed, temperature=1.0 + seed % 3) for seed in range(12)]
    [outcomes] = run(core_with(RandomRunner(num_pages=256)), [prefill_for([1, 2, 3], choices)])
    ended = [outcome for outcome in outcomes if outcome.reason == "stop"]
    assert ended, "no value came to its end"
    assert {outcome.reason for outcome in outcomes} <= {"stop", "length"}
    for outcome in ended:
        assert violations(schema, outcome.text) == [], outcome.text
        assert b"\n" not in outcome.text and b"  " not in re.sub(rb'"([^"\\]|\\.)*"', b"s", outcome.text)


CONSTRAINTS: list[tuple[Constraint, str]] = [
    (JsonObject("response_format"), r"\{.*\}"),
    (Regex("[a-c]{2,4}-[0-9]+", "r"), "[a-c]{2,4}-[0-9]+"),
    (Regex("", "r"), ""),
    (Choice(("yes", "no", "yes and no"), "c"), "yes|no|yes and no"),
    (Choice(("", "é\n"), "c"), "(é\n)?"),
    (Lark('start: "<" item ("," item)* ">"\nitem: /[a-z]{1,3}/', "g"), "<[a-z]{1,3}(,[a-z]{1,3})*>"),
    (Lark('start: "n=" %json {"type": "integer", "multipleOf": 5}', "g"), r"n=-?(\d*[05])"),
]


@pytest.mark.parametrize(("constraint", "pattern"), CONSTRAINTS, ids=lambda value: str(value)[:50])
def test_other_kinds_of_constraints(constraint: Constraint, pattern: str) -> None:
    choices = [constrained(constraint, seed) for seed in range(8)]
    [outcomes] = run(core_with(RandomRunner(num_pages=256)), [prefill_for([5], choices)])
    ended = [outcome for outcome in outcomes if outcome.reason == "stop"]
    assert ended
    for outcome in ended:
        assert re.fullmatch(pattern, outcome.text.decode(), re.DOTALL), outcome.text


def calls(max_blocks: int | None) -> JsonBlocks:
    def block(name: str, schema: object) -> JsonBlock:
        value = JsonSchema(json.dumps(schema), f"tools.{name}")
        return JsonBlock(f'{{"name": "{name}", "arguments": ', value, "}")

    blocks = (block("find", PERSON), block("now", {"type": "object", "additionalProperties": False}))
    return JsonBlocks(blocks, "tools", "[", ", ", "]", max_blocks)


@pytest.mark.parametrize("max_blocks", [1, 3, None])
def test_blocks_of_json_between_fixed_text(max_blocks: int | None) -> None:
    choices = [constrained(calls(max_blocks), seed, max_tokens=400) for seed in range(12)]
    [outcomes] = run(core_with(RandomRunner(num_pages=512)), [prefill_for([5], choices)])
    made = [json.loads(outcome.text) for outcome in outcomes if outcome.reason == "stop"]
    assert made and all(1 <= len(entries) <= (max_blocks or 99) for entries in made)
    for entry in (entry for entries in made for entry in entries):
        schema = {"find": PERSON, "now": {"const": {}}}[entry["name"]]
        assert violations(schema, json.dumps(entry["arguments"]).encode()) == []


def test_a_block_that_does_not_compile_is_blamed_by_its_own_field() -> None:
    good = calls(1)
    for schema in ({"type": "str"}, {"not": {}}, {"allOf": [{"type": "null"}, {"type": "string"}]}):
        bad = JsonBlock("<", JsonSchema(json.dumps(schema), "tools[2].function.parameters"), ">")
        with pytest.raises(InvalidConstraint) as refusal:
            compiler().compile(replace(good, blocks=(*good.blocks, bad)))
        assert refusal.value.param == "tools[2].function.parameters"


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("[a", "p"),
        Regex("(?=a)b", "p"),
        Regex(r"(a)\1", "p"),
        Regex("(" * 300 + "a" + ")" * 300, "p"),
        Regex("a" * 5000, "p"),
        Regex("((a{100}){100}){100}", "p"),
        Regex("a{9999999999999999999999}", "p"),
        Regex(".*" * 2000, "p"),
        Choice((), "p"),
        Choice(("\ud800",), "p"),
        Choice(("x" * 200_000,), "p"),
        Lark("start: (", "p"),
        Lark("start: missing", "p"),
        Lark("start: start", "p"),
        Lark("", "p"),
        Lark('{"grammars": []}', "p"),
        Lark('start: "a"\n' * 5000, "p"),
        Lark("start: " + "(" * 3000 + '"a"' + ")" * 3000, "p"),
        Lark("\n".join(["start: r0", *(f"r{i}:r{i + 1}" for i in range(1200)), 'r1200: "b"']), "p"),
        Lark("start: T\nT: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(12)), "p"),
        Lark("\n".join(["start: T9", "T0: /.*/", *(f"T{i}: " + f"T{i - 1} " * 20 for i in range(1, 10))]), "p"),
        Lark('start: %json {"not": {}}', "p"),
        Lark("start: %json {", "p"),
        JsonBlocks((), "p"),
        JsonBlocks(calls(None).blocks, "p", max_blocks=0),
    ],
    ids=lambda constraint: str(constraint)[:40],
)
def test_what_does_not_compile_is_refused_by_its_field(constraint: Constraint) -> None:
    """Among them what overflows a stack or takes minutes when llguidance is left alone with it."""
    with pytest.raises(InvalidConstraint, match=r"\w") as refusal:
        compiler().compile(constraint)
    assert refusal.value.param == "p"


def test_neighbours_without_a_constraint_are_not_masked() -> None:
    """n=4, two of them constrained, beside another request: each draws what it draws alone."""
    schema = schema_of(PERSON)
    mixed = [constrained(schema, 1), constrained(None, 2), constrained(Regex("[ab]+", "r"), 3), constrained(None, 4)]
    other = [constrained(None, 9), constrained(schema, 1)]
    together = run(core_with(RandomRunner(num_pages=256)), [prefill_for([7, 8], mixed), prefill_for([9], other)])
    for prompt, choices, outcomes in zip(([7, 8], [9]), (mixed, other), together, strict=True):
        for choice, outcome in zip(choices, outcomes, strict=True):
            [[alone]] = run(core_with(RandomRunner(num_pages=256)), [prefill_for(prompt, [choice])])
            assert outcome == alone
    assert together[0][1].text[:40] != together[0][0].text[:40]


def test_preemption_in_the_middle_of_a_value_changes_nothing() -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 40, "maxItems": 40}
    choices = [constrained(schema_of(schema), seed) for seed in range(6)]
    prompt = list(range(40))
    roomy, tight = RandomRunner(num_pages=256), RandomRunner(num_pages=10)
    expected = run(core_with(roomy), [prefill_for(prompt, choices)])
    assert run(core_with(tight), [prefill_for(prompt, choices)]) == expected
    assert tight.num_rows > roomy.num_rows, "nothing was preempted and computed again"
    assert all(violations(schema, outcome.text) == [] for outcome in expected[0] if outcome.reason == "stop")


def test_choices_that_run_in_waves_have_a_matcher_each() -> None:
    choices = [constrained(schema_of(PERSON), seed) for seed in range(6)]
    expected = run(core_with(RandomRunner(num_pages=256)), [prefill_for([3], choices)])
    assert run(core_with(RandomRunner(num_pages=256), max_num_seqs=2), [prefill_for([3], choices)]) == expected


def test_a_value_that_max_tokens_cuts_is_length() -> None:
    choices = [constrained(schema_of({"const": "a long text"}), seed, max_tokens=3) for seed in range(3)]
    [outcomes] = run(core_with(RandomRunner()), [prefill_for([3], choices)])
    assert outcomes == [Outcome(b'"a ', "length", None)] * 3


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}])
def test_a_complete_value_ends_the_choice_whatever_else_is_asked_for(options: dict[str, object]) -> None:
    [[outcome]] = run(core_with(RandomRunner()), [prefill_for([3], [constrained(Regex("ab", "r"), **options)])])
    assert outcome == Outcome(b"ab", "stop", None)


def test_min_tokens_holds_while_something_else_may_follow() -> None:
    choices = [constrained(Regex("a+", "r"), seed, min_tokens=20) for seed in range(4)]
    [outcomes] = run(core_with(RandomRunner(closing=9.0)), [prefill_for([3], choices)])
    assert all(len(outcome.text) >= 20 for outcome in outcomes)


def test_a_grammar_that_comes_to_a_dead_end_fails_its_own_choice_only() -> None:
    """It names the end of sequence in its middle, which would pass for a complete text."""
    broken = constrained(Lark('start: "a" <[2]> "b"', "g"))
    [outcomes] = run(core_with(RandomRunner()), [prefill_for([3], [broken, constrained(Regex("ab", "r"))])])
    assert outcomes[0].reason == "error" and "constraint" in str(outcomes[0].error)
    assert outcomes[1] == Outcome(b"ab", "stop", None)


def test_a_runner_that_ignores_the_mask_is_found_out() -> None:
    class Deaf(RandomRunner):
        def execute(self, plan: StepPlan) -> list[SampledToken]:
            super().execute(plan)
            return [SampledToken(EOS) for _ in plan.sampling_rows]

    [[outcome]] = run(core_with(Deaf()), [prefill_for([3], [constrained(Regex("ab", "r"))])])
    assert outcome.reason == "error" and outcome.text == b""


def test_the_compiler_is_made_from_the_model_folder(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    made = load_compiler(str(tmp_path), VOCAB_SIZE, frozenset({EOS}))
    assert made is not None
    assert accepts(made.compile(Regex("a[bc]", "r")), "ac")


@pytest.mark.parametrize("family", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def test_tokenizers_of_either_family_serve(family: object, tmp_path: Path) -> None:
    tokenizer = family()  # type: ignore[operator]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    made = load_compiler(str(tmp_path), tokenizer.get_vocab_size() + 40, frozenset({eos}))
    assert made is not None
    matcher = made.compile(Choice(("hello world",), "c")).fork()
    text = []
    while not matcher.allowed()[eos >> 5] >> (eos & 31) & 1:
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        text.append(int(allowed[-1]))
        assert matcher.accept(text[-1])
    assert tokenizer.decode(text).strip() == "hello world"


def test_a_model_whose_tokenizer_does_not_serve_has_no_compiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_compiler(None, 10, frozenset({1})) is None
    assert load_compiler(str(tmp_path), 10, frozenset({1})) is None
    assert "structured output is not available" in caplog.text
    save_family("llama", tmp_path)
    assert load_compiler(str(tmp_path), VOCAB_SIZE, frozenset()) is None


WEATHER = JsonBlock('\n{"name": "w", "arguments": ', schema_of({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}), "}\n</tool_call>")  # fmt: skip  # noqa: E501
CALL_TEXT = '<tool_call>\n{"name": "w", "arguments": {"a": 5}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("free <tool_cal text >", True),
        (CALL_TEXT, True),
        (f"so: {CALL_TEXT}\n{CALL_TEXT} and <tool_", True),
        (CALL_TEXT.replace("5", '"x"'), False),
        (CALL_TEXT.replace('"w"', '"v"'), False),
        ("<tool_call>", False),
        ("a <tool_call> b", False),
        (CALL_TEXT[:-1], False),
    ],
)
@pytest.mark.parametrize("max_blocks", [None, 1])
def test_blocks_follow_their_trigger_and_text_is_free(text: str, fits: bool, max_blocks: int | None) -> None:
    matcher = compiler().compile(TriggeredBlocks((WEATHER,), "<tool_call>", "tools", max_blocks=max_blocks))
    assert accepts(matcher, text) == (fits and (max_blocks is None or text.count("<tool_call>") <= max_blocks))


def test_a_trigger_may_be_a_special_token_and_so_may_what_free_text_has(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<think>", "<other>"]})
    tokenizer.save_pretrained(tmp_path)
    call, think, other = tokenizer.convert_tokens_to_ids(["<tool_call>", "<think>", "<other>"])
    compiler = load_compiler(str(tmp_path), len(tokenizer), frozenset({EOS}))
    assert compiler is not None
    matcher = compiler.compile(TriggeredBlocks((WEATHER,), "<tool_call>", "tools", marks=("<think>", "</think>")))
    texts = token_texts()
    ids = [think, *(texts.index(bytes([byte])) for byte in b"a<tool_call>b"), think, call]
    for token_id in ids:
        assert not matcher.fork().accept(other)
        assert matcher.accept(token_id)
    assert not matcher.fork().accept(EOS) and not matcher.fork().accept(think)
    for byte in CALL_TEXT.removeprefix("<tool_call>").encode():
        assert matcher.accept(texts.index(bytes([byte])))
    assert matcher.fork().accept(EOS) and matcher.accept(think)
