"""What becomes of every field of a response's request; see `fields`."""

from __future__ import annotations

from collections.abc import Mapping

from service.schemas.field_rules import FieldRule, honoured, no_op, refused
from service.schemas.fields import SHARED

_NO_BUILT_IN = "there are no built-in tools here; functions are supported"
_TEXT_ONLY = "this server takes and makes text only"
_CUSTOM = "custom tools are not supported; functions are"
_CACHED = "every prefix is cached"
_MODEL_CALLS = "only the model calls functions, and waits for what they give"
_UNNUMBERED = "a response has no place for it"

BUILT_IN_TOOLS = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)

FOREIGN_ITEMS = (
    "additional_tools",
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)


def _item(kind: str, note: str, more: Mapping[str, FieldRule]) -> dict[str, FieldRule]:
    fields = {
        "": honoured(note),
        ".type": honoured("the kind of item"),
        ".id": honoured("kept where the response is stored"),
        ".status": no_op("what there is of it counts"),
        **more,
    }
    return {f"input[{kind}]{suffix}": rule for suffix, rule in fields.items()}


def _text_part(path: str, kind: str, more: Mapping[str, FieldRule]) -> dict[str, FieldRule]:
    fields = {"": honoured("a text part"), ".type": honoured("the kind of part"), ".text": honoured("its text"), **more}
    return {f"{path}[{kind}]{suffix}": rule for suffix, rule in fields.items()}


_BREAKPOINT = {".prompt_cache_breakpoint": no_op(_CACHED)}
_CONTENT = "input[message].content"
_OUTPUT = "input[function_call_output].output"
_CALLER = {
    ".namespace": refused(_NO_BUILT_IN),
    ".caller": refused(_MODEL_CALLS, {"type": "direct"}),
}

_INPUT: dict[str, FieldRule] = {
    "input": honoured("text, or items of a conversation"),
    **_item(
        "message",
        "what somebody says; a developer's is rendered as a system message",
        {
            ".role": honoured("who speaks"),
            ".phase": no_op("a label"),
            ".content": honoured("text, or text parts; parts are joined by line breaks"),
        },
    ),
    **_text_part(_CONTENT, "input_text", _BREAKPOINT),
    **_text_part(
        _CONTENT,
        "output_text",
        {
            ".annotations": no_op("citations are not part of the prompt"),
            ".logprobs": no_op("not part of the prompt"),
            ".parsed": no_op("`text` counts; openai-python adds it to answers that it parses"),
        },
    ),
    f"{_CONTENT}[refusal]": honoured("counts as text"),
    f"{_CONTENT}[refusal].type": honoured("the kind of part"),
    f"{_CONTENT}[refusal].refusal": honoured("its text"),
    f"{_CONTENT}[input_image]": refused(_TEXT_ONLY),
    f"{_CONTENT}[input_file]": refused(_TEXT_ONLY),
    **_item(
        "function_call",
        "a call of an earlier answer",
        {
            ".call_id": honoured("given to the chat template"),
            ".name": honoured("the function"),
            ".arguments": honoured("JSON; the chat template gets it as an object"),
            ".parsed_arguments": no_op("`arguments` counts; openai-python adds it to answers that it parses"),
            ".async": refused(_MODEL_CALLS, False),
            ".async_": refused(_MODEL_CALLS, False),
            **_CALLER,
        },
    ),
    **_item(
        "function_call_output",
        "what a call gave",
        {
            ".call_id": honoured("given to the chat template"),
            ".name": honoured("given to the chat template"),
            ".output": honoured("text, or text parts; parts are joined by line breaks"),
            **_CALLER,
        },
    ),
    **_text_part(_OUTPUT, "input_text", _BREAKPOINT),
    f"{_OUTPUT}[input_image]": refused(_TEXT_ONLY),
    f"{_OUTPUT}[input_file]": refused(_TEXT_ONLY),
    **_item(
        "reasoning",
        "reasoning of an earlier answer, for the message or the calls behind it",
        {
            ".content": honoured("given to the chat template"),
            ".encrypted_content": refused("reasoning is sent and taken as `content`"),
            ".summary": honoured("given to the chat template where there is no `content`"),
        },
    ),
    **{
        f"input[reasoning].{field}[{kind}]{suffix}": honoured(note)
        for field, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
        for suffix, note in (("", "a text part"), (".type", "the kind of part"), (".text", "its text"))
    },
    "input[item_reference]": honoured("an item of a stored response"),
    "input[item_reference].type": honoured("the kind of item"),
    "input[item_reference].id": honoured("which"),
    "input[custom_tool_call]": refused(_CUSTOM),
    "input[custom_tool_call_output]": refused(_CUSTOM),
    **{f"input[{kind}]": refused(_NO_BUILT_IN) for kind in FOREIGN_ITEMS},
}

_TOOLS: dict[str, FieldRule] = {
    "tools": honoured("up to 128 functions"),
    "tools[function]": honoured("a function"),
    "tools[function].type": honoured("the kind of tool"),
    "tools[function].name": honoured("how calls name it"),
    "tools[function].description": honoured("given to the chat template"),
    "tools[function].parameters": honoured("as in a chat"),
    "tools[function].strict": honoured("as in a chat; false without it"),
    "tools[function].allowed_callers": refused(_MODEL_CALLS, ["direct"]),
    "tools[function].async": refused(_MODEL_CALLS, False),
    "tools[function].defer_loading": refused("all tools are shown at once", False),
    "tools[function].output_schema": refused("chat templates do not show what functions give"),
    "tools[custom]": refused(_CUSTOM),
    **{f"tools[{kind}]": refused(_NO_BUILT_IN) for kind in BUILT_IN_TOOLS},
    "tool_choice": honoured("none: no tools are shown; required and named calls are enforced, whatever the model"),
    "tool_choice[function]": honoured("this one is called, once"),
    "tool_choice[function].type": honoured("the kind of tool"),
    "tool_choice[function].name": honoured("one of the tools'"),
    "tool_choice[allowed_tools]": honoured("all tools are shown, these may be called"),
    "tool_choice[allowed_tools].type": honoured("the kind of choice"),
    "tool_choice[allowed_tools].mode": honoured("auto or required"),
    "tool_choice[allowed_tools].tools": honoured("named as in `tool_choice`"),
    "tool_choice[allowed_tools].tools[function]": honoured("a tool"),
    "tool_choice[allowed_tools].tools[function].type": honoured("the kind of tool"),
    "tool_choice[allowed_tools].tools[function].name": honoured("one of the tools'"),
    "tool_choice[custom]": refused(_CUSTOM),
    **{f"tool_choice[{kind}]": refused(_NO_BUILT_IN) for kind in (*BUILT_IN_TOOLS, "computer_use")},
    "parallel_tool_calls": honoured("false: one call at most, behind which a choice ends"),
    "max_tool_calls": no_op("it counts calls of built-in tools, of which there are none"),
}

_TEXT: dict[str, FieldRule] = {
    "text": honoured("what the text must be"),
    "text.format": honoured("any text, a JSON object, or JSON that a schema accepts"),
    **{
        f"text.format[{kind}]{suffix}": honoured(note)
        for kind, note in {
            "text": "any text",
            "json_object": "a JSON object",
            "json_schema": "JSON that a schema accepts",
        }.items()
        for suffix in ("", ".type")
    },
    "text.format[json_schema].name": no_op("a label"),
    "text.format[json_schema].description": no_op("a label"),
    "text.format[json_schema].strict": no_op("every schema is enforced"),
    "text.format[json_schema].schema": honoured("enforced whole; an unsupported keyword is refused"),
    "text.verbosity": refused("verbosity cannot be set", "medium"),
}

RESPONSE_FIELDS: Mapping[str, FieldRule] = {
    **{name: rule for name, rule in SHARED.items() if not name.startswith("fan_out.")},
    "n": refused("a response has one output", 1),
    "fan_out": refused("a response has one output; chats have several"),
    "max_tokens": refused("`max_output_tokens` is its name here"),
    "stream_options.include_usage": no_op("the last event always has the usage"),
    "stream_options.continuous_usage_stats": refused(_UNNUMBERED, False),
    "return_token_ids": refused(_UNNUMBERED, False),
    "prompt_logprobs": refused(_UNNUMBERED),
    "kv_transfer_params": refused(_UNNUMBERED),
    "user": no_op("repeated in the answer"),
    **_INPUT,
    "instructions": honoured("the system message; not those of an earlier response"),
    "max_output_tokens": honoured("up to the context's end without it; reasoning counts"),
    "previous_response_id": honoured("a stored response that the conversation goes on from"),
    "store": honoured(
        "whether the response is kept, where `CHORUS_RESPONSES_STORE` is set; the answer's `store` tells"
    ),
    "truncation": honoured("auto: the oldest items are left out until the rest fits; instructions stay"),
    "include": honoured("`message.output_text.logprobs`; `reasoning.encrypted_content` adds nothing: it comes as text"),
    "metadata": honoured("up to 16 pairs, kept and repeated"),
    "reasoning": honoured("for models whose chat template knows it"),
    "reasoning.effort": honoured("none: no reasoning"),
    "reasoning.summary": no_op("the reasoning is sent whole"),
    "reasoning.generate_summary": no_op("the reasoning is sent whole"),
    "reasoning.context": refused("the chat template says which reasoning it shows again", "auto"),
    "reasoning.mode": refused("there is one mode", "standard"),
    **_TEXT,
    **_TOOLS,
    "top_logprobs": honoured("0 to 20; needs `include` of `message.output_text.logprobs`"),
    "chat_template": honoured("extension: as in a chat"),
    "chat_template_kwargs": honoured("extension: variables of the chat template, where it knows them"),
    "chat_template_kwargs.enable_thinking": honoured("whether the model reasons"),
    "chat_template_kwargs.thinking": honoured("whether the model reasons"),
    "prompt_cache_key": no_op(_CACHED),
    "prompt_cache_options": no_op(_CACHED),
    "prompt_cache_retention": no_op(_CACHED),
    "safety_identifier": no_op("repeated in the answer"),
    "access_programs": refused("there are no such programs here"),
    "background": refused("every response is waited for", False),
    "background_options": refused("every response is waited for"),
    "context_management": refused("`truncation` is what there is", []),
    "conversation": refused("`previous_response_id` is what there is"),
    "image": refused(_TEXT_ONLY),
    "moderation": refused("there is no moderation here"),
    "prompt": refused("there are no stored prompts here"),
    "service_tier": refused("there is one tier", "auto", "default"),
}
