"""What becomes of every field that the OpenAI SDK knows, and of our own: one table for each endpoint.

A path names nested fields: `messages[user].content[text].text` is the `text` of a part of type "text" in a message of
role "user". What is said of a field that is refused or ignored holds for all beneath it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    HONOURED = "honoured"
    NO_OP = "no-op"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """note: for docs and errors. neutral: values of a refused field that ask for nothing and are accepted."""

    use: Use
    note: str
    neutral: tuple[object, ...] = ()


def _honoured(note: str) -> FieldRule:
    return FieldRule(Use.HONOURED, note)


def _no_op(note: str) -> FieldRule:
    return FieldRule(Use.NO_OP, note)


def _refused(note: str, *neutral: object) -> FieldRule:
    return FieldRule(Use.REFUSED, note, neutral)


_SHARED: dict[str, FieldRule] = {
    "model": _honoured("the served name, exactly"),
    "n": _honoured("choices per prompt, all from one prefill; choice i draws from seed + i"),
    "seed": _honoured("0 to 2^63 - 1; without one a fresh seed is drawn for each request and logged"),
    "stream": _honoured("server-sent events"),
    "stream_options": _honoured("only with `stream`"),
    "stream_options.include_usage": _honoured("one last chunk without choices carries the usage"),
    "stream_options.continuous_usage_stats": _honoured("extension: every chunk has the usage so far"),
    "stream_options.include_obfuscation": _no_op("chunks are never padded"),
    "max_tokens": _honoured(
        "tokens of each choice; chat: up to the context's end without it, completions: 16; 0 with `echo`"
    ),
    "min_tokens": _honoured("extension: neither stop token nor stop string ends a choice before so many"),
    "temperature": _honoured("0 to 2; 0 is greedy"),
    "top_p": _honoured("0 to 1; 0 keeps the likeliest token alone"),
    "top_k": _honoured("extension: the k likeliest tokens; -1 or 0 keeps all"),
    "min_p": _honoured("extension: tokens at least so likely as this share of the likeliest one"),
    "stop": _honoured("up to 16 strings, 16 KiB together"),
    "stop_token_ids": _honoured("extension: tokens that end a choice; they are not part of the text"),
    "ignore_eos": _honoured("extension: go on after the model's own end"),
    "frequency_penalty": _honoured("-2 to 2"),
    "presence_penalty": _honoured("-2 to 2"),
    "repetition_penalty": _honoured("extension: 0.01 to 10, counts the prompt too"),
    "logit_bias": _honoured("token id to a bias of -100 to 100"),
    "user": _no_op("nothing is kept about users"),
    "timeout": _honoured("extension: seconds until the answer ends with what there is (`end_reason: deadline`)"),
    "request_id": _honoured("extension: echoed as X-Request-Id, listed and logged; never a key to anything"),
    "priority": _honoured("extension: smaller runs first; where keys are set, not below the key's own"),
    "include_stop_str_in_output": _honoured("extension: what ends a choice is part of its text"),
    "skip_special_tokens": _honoured("extension: false shows special tokens as text"),
    "return_token_ids": _honoured("extension: token ids of prompts and choices"),
    "truncate_prompt_tokens": _honoured("extension: of a longer prompt its last so many tokens"),
    "cache_salt": _honoured("extension: prefixes are shared only between requests with the same one"),
    "allowed_token_ids": _honoured("extension: only these are drawn; the model's own end is none of them unless named"),
    "bad_words": _honoured("extension: texts, 4 KiB together, that occur in no answer, however it is cut into tokens"),
    "max_streaming_response_tokens": _honoured("extension: so many tokens make a chunk; with `stream`"),
    "prompt_logprobs": _honoured("extension: 0 to 20; of each token of the prompt, and of so many likeliest there"),
    "structured_outputs": _honoured("extension: what the text must be; exactly one of its fields"),
    "structured_outputs.json": _honoured("a JSON schema, as an object or as its text"),
    "structured_outputs.json_object": _honoured("true: a JSON object"),
    "structured_outputs.regex": _honoured("a regular expression that matches the whole text; no lookaround"),
    "structured_outputs.choice": _honoured("one of these texts"),
    "structured_outputs.grammar": _honoured("a Lark grammar, as llguidance reads it"),
    "fan_out": _honoured("extension: steers the choices of one request while they run"),
    "fan_out.on_error": _honoured("`fail`: a failing choice fails the request; `isolate`: it ends alone"),
    "fan_out.stop_after": _honoured("once so many choices of a prompt have ended by themselves the rest is cancelled"),
    "fan_out.keep_unfinished": _honoured("false leaves out what was cancelled; not streamed"),
    "fan_out.rank_by": _honoured("`logprob`: best first by mean logprob; not streamed"),
    "fan_out.keep": _honoured("the best so many of each prompt; with `rank_by`"),
    "fan_out.agree": _honoured("once so many choices of a prompt give the same answer the rest is cancelled"),
    "fan_out.agree.on": _honoured("`text`: all of it; `json_pointer`: a value in it; `regex`: first group of a match"),
    "fan_out.agree.value": _honoured("the JSON pointer (RFC 6901) or the regex (RE2)"),
    "fan_out.agree.count": _honoured("how many must agree"),
    "fan_out.details": _honoured("adds seed, cached tokens, times and mean logprob to each choice"),
}

_NAME = _honoured("given to the chat template")
_TEXT_PARTS = {
    ".content": _honoured("text, or text parts; parts are joined by line breaks"),
    ".content[text]": _honoured("a text part"),
    ".content[text].type": _honoured("the kind of part"),
    ".content[text].text": _honoured("its text"),
    ".content[text].prompt_cache_breakpoint": _no_op("every prefix is cached"),
}
_ONLY_TEXT = _refused("only text parts are supported")


def _message(role: str, note: str, more: Mapping[str, FieldRule]) -> dict[str, FieldRule]:
    fields = {"": _honoured(note), ".role": _honoured("who speaks"), ".name": _NAME, **_TEXT_PARTS, **more}
    return {f"messages[{role}]{suffix}": rule for suffix, rule in fields.items()}


_TOOLS = "`tools` is its newer name"
_CUSTOM = "custom tools are not supported; functions are"
_PARSED = "`{}` counts; openai-python adds it to answers that it parses"
_TEXT_ONLY = "this server takes and makes text only"

CHAT_FIELDS: Mapping[str, FieldRule] = {
    **_SHARED,
    "messages": _honoured("the conversation"),
    **_message("system", "instructions", {}),
    **_message("developer", "instructions, rendered as a system message", {}),
    **_message(
        "user",
        "what the user says",
        {".content[image_url]": _ONLY_TEXT, ".content[input_audio]": _ONLY_TEXT, ".content[file]": _ONLY_TEXT},
    ),
    **_message(
        "assistant",
        "an earlier answer; all that an answer carries may be sent back",
        {
            ".content[refusal]": _ONLY_TEXT,
            ".refusal": _honoured("stands in for content where that is null"),
            ".reasoning_content": _honoured("extension: given to the chat template"),
            ".annotations": _no_op("citations are not part of the prompt"),
            ".audio": _refused(_TEXT_ONLY),
            ".parsed": _no_op(_PARSED.format("content")),
            ".tool_calls": _honoured("calls of an earlier answer"),
            ".tool_calls[function]": _honoured("a call"),
            ".tool_calls[function].type": _honoured("the kind of call"),
            ".tool_calls[function].id": _honoured("given to the chat template"),
            ".tool_calls[function].index": _no_op("the order of the list counts; the client's stream helper keeps it"),
            ".tool_calls[function].function": _honoured("what was called"),
            ".tool_calls[function].function.name": _honoured("the function"),
            ".tool_calls[function].function.arguments": _honoured("JSON; the chat template gets it as an object"),
            ".tool_calls[function].function.parsed_arguments": _no_op(_PARSED.format("arguments")),
            ".tool_calls[custom]": _refused(_CUSTOM),
            ".function_call": _honoured("as a tool call; the older form"),
            ".function_call.name": _honoured("the function"),
            ".function_call.arguments": _honoured("JSON; the chat template gets it as an object"),
            ".function_call.parsed_arguments": _no_op(_PARSED.format("arguments")),
        },
    ),
    **_message("tool", "what a call gave", {".tool_call_id": _honoured("given to the chat template")}),
    "messages[function]": _honoured("rendered as a tool message; the older form"),
    "messages[function].role": _honoured("who speaks"),
    "messages[function].content": _honoured("text"),
    "messages[function].name": _NAME,
    "max_completion_tokens": _honoured("the newer name of max_tokens; they must agree when both are given"),
    "metadata": _no_op("nothing is stored"),
    "parallel_tool_calls": _honoured("false: one call at most, behind which a choice ends"),
    "prediction": _no_op("a hint that may only change the speed"),
    "prompt_cache_key": _no_op("every prefix is cached"),
    "prompt_cache_options": _no_op("every prefix is cached"),
    "prompt_cache_retention": _no_op("every prefix is cached"),
    "safety_identifier": _no_op("nothing is kept about users"),
    "store": _no_op("nothing is stored"),
    "audio": _refused(_TEXT_ONLY),
    "function_call": _refused(_TOOLS, "none", "auto"),
    "functions": _refused(_TOOLS, []),
    "logprobs": _honoured("of every token, as the model itself gives it: before temperature, bias and penalties"),
    "modalities": _refused(_TEXT_ONLY, ["text"]),
    "moderation": _refused("there is no moderation here"),
    "reasoning_effort": _honoured("for models whose chat template knows it; none: no reasoning"),
    "chat_template": _honoured(
        "extension: the client's own, up to 64 KiB; only where `CHORUS_TRUST_REQUEST_CHAT_TEMPLATE` allows it"
    ),
    "chat_template_kwargs": _honoured("extension: variables of the chat template, where it knows them"),
    "chat_template_kwargs.enable_thinking": _honoured("whether the model reasons"),
    "chat_template_kwargs.thinking": _honoured("whether the model reasons"),
    "add_generation_prompt": _honoured("extension: false leaves it to the model whose turn it is"),
    "continue_final_message": _honoured("extension: the answer goes on with the last message, an assistant's"),
    "response_format": _honoured("what the text must be"),
    **{
        f"response_format[{kind}]{suffix}": _honoured(note)
        for kind, note in {
            "text": "any text",
            "json_object": "a JSON object",
            "json_schema": "JSON that a schema accepts",
        }.items()
        for suffix in ("", ".type")
    },
    "response_format[json_schema].json_schema": _honoured("the schema and its name"),
    "response_format[json_schema].json_schema.name": _no_op("a label"),
    "response_format[json_schema].json_schema.description": _no_op("a label"),
    "response_format[json_schema].json_schema.strict": _no_op("every schema is enforced"),
    "response_format[json_schema].json_schema.schema": _honoured("enforced whole; an unsupported keyword is refused"),
    "service_tier": _refused("there is one tier", "auto", "default"),
    "tool_choice": _honoured("none: no tools are shown; required and named calls are enforced, whatever the model"),
    "tool_choice[function]": _honoured("this one is called, once, and the choice ends in `stop`"),
    "tool_choice[function].type": _honoured("the kind of tool"),
    "tool_choice[function].function": _honoured("which"),
    "tool_choice[function].function.name": _honoured("one of the tools'"),
    "tool_choice[allowed_tools]": _honoured("all tools are shown, these may be called"),
    "tool_choice[allowed_tools].type": _honoured("the kind of choice"),
    "tool_choice[allowed_tools].allowed_tools": _honoured("which, and whether one must be called"),
    "tool_choice[allowed_tools].allowed_tools.mode": _honoured("auto or required"),
    "tool_choice[allowed_tools].allowed_tools.tools": _honoured("named as in `tool_choice`"),
    "tool_choice[allowed_tools].allowed_tools.tools[function]": _honoured("a tool"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].type": _honoured("the kind of tool"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].function": _honoured("which"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].function.name": _honoured("one of the tools'"),
    "tool_choice[custom]": _refused(_CUSTOM),
    "tools": _honoured("up to 128; shown as text, to be called by `<tool_call>`, where the chat template knows none"),
    "tools[function]": _honoured("a function"),
    "tools[function].type": _honoured("the kind of tool"),
    "tools[function].function": _honoured("what it is"),
    "tools[function].function.name": _honoured("how calls name it"),
    "tools[function].function.description": _honoured("given to the chat template"),
    "tools[function].function.parameters": _honoured(
        "the schema of its arguments: for the template, and enforced in required, named and strict calls"
    ),
    "tools[function].function.strict": _honoured(
        "true: the schema is checked, and calls that the model makes by itself follow it too, if it marks them as "
        "hermes does (`<tool_call>`)"
    ),
    "tools[custom]": _refused(_CUSTOM),
    "top_logprobs": _honoured("0 to 20; needs `logprobs`"),
    "verbosity": _refused("verbosity cannot be set", "medium"),
    "web_search_options": _refused("there is no web search here"),
}

COMPLETION_FIELDS: Mapping[str, FieldRule] = {
    **_SHARED,
    "prompt": _honoured("text, token ids, or a list of either; special tokens in text are parsed"),
    "best_of": _honoured("n to 128: as many are drawn, the n best by mean logprob returned; not streamed"),
    "echo": _honoured("the prompt before each answer; with `logprobs` those of its tokens too"),
    "logprobs": _honoured("0 to 5 likeliest tokens beside the drawn one"),
    "suffix": _honoured("what follows the answer, for models whose tokenizer has fill-in-the-middle tokens"),
}


def rule_for(fields: Mapping[str, FieldRule], path: str) -> FieldRule | None:
    """The rule that holds for a path: its own, or that of a refused or ignored field above it."""
    if path in fields:
        return fields[path]
    while path := path[: max(path.rfind("."), path.rfind("["))] if ("." in path or "[" in path) else "":
        above = fields.get(path)
        if above is not None:
            return above if above.use is not Use.HONOURED else None
    return None


def fields_table() -> str:
    """The README's table of request fields by endpoint, in Markdown: those of the request itself, not those in them."""
    rows = ["| field | chat/completions | completions | |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys((*CHAT_FIELDS, *COMPLETION_FIELDS)):
        if "." in name or "[" in name:
            continue
        rules = [fields.get(name) for fields in (CHAT_FIELDS, COMPLETION_FIELDS)]
        uses = " | ".join("" if rule is None else rule.use.value for rule in rules)
        notes = dict.fromkeys(_shown_note(rule) for rule in rules if rule is not None)
        rows.append(f"| `{name}` | {uses} | {'; completions: '.join(notes)} |")
    return "\n".join(rows)


def _shown_note(rule: FieldRule) -> str:
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
    return rule.note + (f" (accepted: {accepted})" if accepted else "")
