"""Every field that the pinned OpenAI SDK knows has a rule, and our request Structs agree with the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from msgspec import inspect
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage, ParsedFunction, ParsedFunctionToolCall
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputMessage,
    ParsedResponseOutputText,
    ResponseReasoningItem,
    response_create_params,
)
from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from service.schemas.chat import AssistantMessage, ChatCompletionRequest, ChatMessage
from service.schemas.completions import CompletionRequest
from service.schemas.embedding_fields import EMBEDDING_FIELDS
from service.schemas.embeddings import EmbeddingCreateRequest
from service.schemas.field_rules import Use, rule_for
from service.schemas.fields import CHAT_FIELDS, COMPLETION_FIELDS
from service.schemas.fields_table import fields_table
from service.schemas.response_fields import RESPONSE_FIELDS
from service.schemas.response_items import INPUT_ITEMS, PastText
from service.schemas.responses import ResponseRequest
from service.schemas.tools import CalledFunction, PastCall

TAGS = {"chat": ("role", "type"), "completion": (), "response": ("type",), "embedding": ()}
"""By which fields the kinds of nested objects are told apart."""

ALWAYS_TAGGED = ("messages", "content", "input", "output", "tools", "summary", "format")


def _typeddicts(annotation: Any) -> Iterator[Any]:
    """All TypedDicts that a value of this type may hold, below lists, unions and mappings."""
    if is_typeddict(annotation):
        yield annotation
    else:
        for argument in get_args(annotation) if get_origin(annotation) is not Literal else ():
            yield from _typeddicts(argument)


def _unwrap(annotation: Any) -> Any:
    while get_origin(annotation) in (Required, NotRequired):
        (annotation,) = get_args(annotation)
    return annotation


def _literals(annotation: Any) -> Iterator[str]:
    """Of a literal, or of an optional one."""
    annotation = _unwrap(annotation)
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for argument in get_args(annotation):
            yield from _literals(argument)


def _tags(typeddict: Any, names: Sequence[str]) -> Iterator[str]:
    """What stands for the object in a path; `web_search` and its dated kin are one."""
    hints = get_type_hints(typeddict)
    for name in names:
        if found := dict.fromkeys(re.sub("_2[0-9_]{3,}$", "", tag) for tag in _literals(hints.get(name))):
            yield from found
            return


def sdk_paths(typeddict: Any, names: Sequence[str], prefix: str = "", seen: tuple[Any, ...] = ()) -> Iterator[str]:
    if typeddict in seen:
        return
    for name, hint in get_type_hints(typeddict).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path
        below = list(_typeddicts(_unwrap(hint)))
        for inner in below:
            tags = list(_tags(inner, names)) if len(below) > 1 or name in ALWAYS_TAGGED else []
            for variant in [f"{path}[{tag}]" for tag in tags] or [path]:
                if variant != path:
                    yield variant
                yield from sdk_paths(inner, names, variant, (*seen, typeddict))


def _sdk(kind: str, *params: Any) -> list[tuple[str, str]]:
    return [(kind, path) for path in sorted({path for one in params for path in sdk_paths(one, TAGS[kind])})]


CASES = (
    _sdk("chat", chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming)
    + _sdk(
        "completion",
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    )
    + _sdk(
        "response",
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    )
    + _sdk("embedding", embedding_create_params.EmbeddingCreateParams)
)
FIELDS = {
    "chat": CHAT_FIELDS,
    "completion": COMPLETION_FIELDS,
    "response": RESPONSE_FIELDS,
    "embedding": EMBEDDING_FIELDS,
}
STRUCTS = {
    "chat": ChatCompletionRequest,
    "completion": CompletionRequest,
    "response": ResponseRequest,
    "embedding": EmbeddingCreateRequest,
}


def test_the_walk_sees_nested_fields() -> None:
    """Guards the guard: a walk that finds nothing would pass."""
    paths = {path for kind, path in CASES if kind == "chat"}
    assert {"messages[user].content[text].text", "stream_options.include_usage", "messages[assistant].name"} <= paths
    assert {"messages[tool].tool_call_id", "web_search_options.user_location.approximate.city"} <= paths
    assert len(paths) > 80
    assert {path for kind, path in CASES if kind == "embedding"} == set(EMBEDDING_FIELDS)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_the_sdk_is_classified(kind: str) -> None:
    assert [path for known, path in CASES if known == kind and rule_for(FIELDS[kind], path) is None] == []


def test_an_unknown_nested_field_is_not_covered_by_an_honoured_parent() -> None:
    assert rule_for(CHAT_FIELDS, "messages[user].mood") is None
    assert rule_for(CHAT_FIELDS, "stream_options.every") is None
    assert rule_for(CHAT_FIELDS, "tools[custom].custom.name") is CHAT_FIELDS["tools[custom]"]


def struct_paths(kind: inspect.Type, prefix: str = "") -> Iterator[str]:
    match kind:
        case inspect.Metadata():
            yield from struct_paths(kind.type, prefix)
        case inspect.UnionType():
            for inner in kind.types:
                yield from struct_paths(inner, prefix)
        case inspect.ListType():
            yield from struct_paths(kind.item_type, prefix)
        case inspect.StructType():
            base = f"{prefix}[{kind.tag}]" if kind.tag is not None else prefix
            if kind.tag is not None:
                yield from (base, f"{base}.{kind.tag_field}")
            for field in kind.fields:
                path = f"{base}.{field.encode_name}" if base else field.encode_name
                yield path
                yield from struct_paths(field.type, path)


@pytest.mark.parametrize("kind", STRUCTS)
def test_structs_and_rules_know_the_same_fields(kind: str) -> None:
    paths, rules = set(struct_paths(inspect.type_info(STRUCTS[kind]))), FIELDS[kind]
    if kind == "response":  # these are decoded one by one
        paths |= {path for item in INPUT_ITEMS.values() for path in struct_paths(inspect.type_info(item), "input")}
    assert {path for path in paths if rule_for(rules, path) is None} == set(), "a Struct's field without a rule"
    # content parts other than text are refused by the decoder itself
    unreachable = {path for path in rules if path not in paths and not path.startswith("messages[") and "[" not in path}
    assert unreachable == set(), "a rule without a Struct's field"
    honoured = {path for path, rule in rules.items() if rule.use is Use.HONOURED}
    assert honoured <= paths


def test_the_readme_has_the_table_of_fields() -> None:
    """To renew it: python -c 'from service.schemas.fields_table import fields_table; print(fields_table())'."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"<!-- fields -->\n{fields_table()}\n<!-- /fields -->" in readme


def test_an_answer_can_be_sent_back() -> None:
    """Both the SDK's message, parsed or not, and our own: clients append it to the conversation as it came."""
    accepted = set(AssistantMessage.__struct_fields__) | {"role"}
    assert issubclass(ChatCompletionMessage, BaseModel)
    assert set(ParsedChatCompletionMessage.model_fields) <= accepted
    assert set(ChatCompletionMessage.model_fields) <= accepted
    assert set(ParsedFunctionToolCall.model_fields) <= {*PastCall.__struct_fields__, "type"}
    assert set(ParsedFunction.model_fields) <= set(CalledFunction.__struct_fields__)
    assert set(ChatMessage.__struct_fields__) <= accepted


def test_an_output_can_be_sent_back() -> None:
    """The SDK's items, parsed or not."""
    items: dict[str, type[BaseModel]] = {
        "message": ParsedResponseOutputMessage,
        "function_call": ParsedResponseFunctionToolCall,
        "reasoning": ResponseReasoningItem,
    }
    for kind, model in items.items():
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert names <= {*INPUT_ITEMS[kind].__struct_encode_fields__, "type"}
    assert set(ParsedResponseOutputText.model_fields) <= {*PastText.__struct_fields__, "type"}


def test_typing_union_is_walked() -> None:
    """The SDK spells unions both ways."""
    assert list(_typeddicts(Union[None, chat_params.Function])) == list(_typeddicts(chat_params.Function | None))  # noqa: UP007
