"""Values of every field that a response's request may have, for test_every_field."""

from __future__ import annotations

from typing import Any

from service.schemas.response_fields import BUILT_IN_TOOLS, FOREIGN_ITEMS

TEXT = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
PAST_TEXT = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [], "parsed": {}}
RESPONSE_TOOLS = [
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
]
NAMED = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": [TEXT], "status": "completed"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "status": "completed",
    "summary": [{"type": "summary_text", "text": "x"}],
    "content": [{"type": "reasoning_text", "text": "x"}],
}
USER = {"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": [TEXT]}
ANSWER = {"type": "message", "role": "assistant", "phase": "final_answer", "content": [PAST_TEXT]}
IMAGE, FILE = {"type": "input_image", "image_url": "data:,"}, {"type": "input_file", "file_id": "x"}

RESPONSE_SAMPLES: dict[str, list[Any]] = {
    "input": [
        "hi",
        [USER, THOUGHT, ANSWER, CALL | {"parsed_arguments": {}}, OUTPUT | {"name": "f"}],
        [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
        *([{**USER, "content": [part]}] for part in (IMAGE, FILE)),
        *([CALL, {**OUTPUT, "output": [part]}] for part in (IMAGE, FILE)),
        *(
            [CALL | more]
            for more in ({"namespace": "n"}, {"caller": {"type": "program"}}, {"async": True}, {"async_": True})
        ),
        *([OUTPUT | more] for more in ({"namespace": "n"}, {"caller": {"type": "program"}})),
        [THOUGHT | {"encrypted_content": "x"}],
        [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}],
        [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}],
        *([{"type": kind}] for kind in FOREIGN_ITEMS),
    ],
    "instructions": ["be brief"],
    "max_output_tokens": [3],
    "truncation": ["auto", "disabled"],
    "include": [["message.output_text.logprobs", "reasoning.encrypted_content"]],
    "metadata": [{"a": "b"}],
    "parallel_tool_calls": [True, False],
    "max_tool_calls": [3],
    "reasoning": [
        {"effort": "none", "summary": "auto", "generate_summary": "auto"},
        {"context": "all_turns"},
        {"mode": "pro"},
    ],
    "store": [True, False],
    "text": [
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}},
        {
            "format": {
                "type": "json_schema",
                "name": "n",
                "description": "d",
                "strict": True,
                "schema": {"type": "object"},
            }
        },
        {"verbosity": "low"},
    ],
    "tools": [
        RESPONSE_TOOLS,
        *(
            [RESPONSE_TOOLS[0] | more]
            for more in (
                {"allowed_callers": ["programmatic"]},
                {"async": True},
                {"defer_loading": True},
                {"output_schema": {}},
            )
        ),
        [{"type": "custom", "name": "f"}],
        *([{"type": kind}] for kind in BUILT_IN_TOOLS),
    ],
    "tool_choice": [
        "required",
        NAMED,
        {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        {"type": "custom", "name": "f"},
        *({"type": kind} for kind in (*BUILT_IN_TOOLS, "computer_use")),
    ],
    "top_logprobs": [5],
    "chat_template": ["{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": True}, {"thinking": None}],
    "prompt_cache_key": ["k"],
    "prompt_cache_options": [{"mode": "implicit"}],
    "prompt_cache_retention": ["24h"],
    "safety_identifier": ["s"],
    "access_programs": [{"cyber": "standard"}],
    "background": [True],
    "background_options": [{"completion_window": "2h"}],
    "context_management": [[{"type": "compaction"}]],
    "conversation": ["conv_1"],
    "image": [{"context_compression": "auto"}],
    "moderation": [{"model": "x"}],
    "prompt": [{"id": "x"}],
    "service_tier": ["flex"],
}
ELSEWHERE = frozenset({"previous_response_id", "input[item_reference]"})
"""Fields whose values depend on what is stored: see test_response_store."""
