"""What becomes of every field that the OpenAI SDK knows, and of our own: one table for each endpoint."""

from __future__ import annotations

from collections.abc import Mapping

from service.schemas.field_rules import FieldRule, honoured, no_op, refused

SHARED: dict[str, FieldRule] = {
    "model": honoured("the served name, exactly"),
    "n": honoured("choices per prompt, all from one prefill; choice i draws from seed + i"),
    "seed": honoured("0 to 2^63 - 1; without one a fresh seed is drawn for each request and logged"),
    "stream": honoured("server-sent events"),
    "stream_options": honoured("only with `stream`"),
    "stream_options.include_usage": honoured("one last chunk without choices carries the usage"),
    "stream_options.continuous_usage_stats": honoured("extension: every chunk has the usage so far"),
    "stream_options.include_obfuscation": no_op("chunks are never padded"),
    "max_tokens": honoured(
        "tokens of each choice; chat: up to the context's end without it, completions: 16; 0 with `echo`"
    ),
    "min_tokens": honoured("extension: neither stop token nor stop string ends a choice before so many"),
    "temperature": honoured("0 to 2; 0 is greedy"),
    "top_p": honoured("0 to 1; 0 keeps the likeliest token alone"),
    "top_k": honoured("extension: the k likeliest tokens; -1 or 0 keeps all"),
    "min_p": honoured("extension: tokens at least so likely as this share of the likeliest one"),
    "stop": honoured("up to 16 strings, 16 KiB together"),
    "stop_token_ids": honoured("extension: tokens that end a choice; they are not part of the text"),
    "ignore_eos": honoured("extension: go on after the model's own end"),
    "frequency_penalty": honoured("-2 to 2"),
    "presence_penalty": honoured("-2 to 2"),
    "repetition_penalty": honoured("extension: 0.01 to 10, counts the prompt too"),
    "logit_bias": honoured("token id to a bias of -100 to 100"),
    "user": no_op("nothing is kept about users"),
    "timeout": honoured("extension: seconds until the answer ends with what there is (`end_reason: deadline`)"),
    "request_id": honoured("extension: echoed as X-Request-Id, listed and logged; never a key to anything"),
    "priority": honoured("extension: smaller runs first; where keys are set, not below the key's own"),
    "include_stop_str_in_output": honoured("extension: what ends a choice is part of its text"),
    "skip_special_tokens": honoured("extension: false shows special tokens as text"),
    "return_token_ids": honoured("extension: token ids of prompts and choices"),
    "truncate_prompt_tokens": honoured("extension: of a longer prompt its last so many tokens"),
    "cache_salt": honoured("extension: prefixes are shared only between requests with the same one"),
    "allowed_token_ids": honoured("extension: only these are drawn; the model's own end is none of them unless named"),
    "bad_words": honoured("extension: texts, 4 KiB together, that occur in no answer, however it is cut into tokens"),
    "max_streaming_response_tokens": honoured("extension: so many tokens make a chunk; with `stream`"),
    "prompt_logprobs": honoured("extension: 0 to 20; of each token of the prompt, and of so many likeliest there"),
    "kv_transfer_params": honoured("extension: for vLLM's connector, where there is one; a choice's end has its own"),
    "structured_outputs": honoured("extension: what the text must be; exactly one of its fields"),
    "structured_outputs.json": honoured("a JSON schema, as an object or as its text"),
    "structured_outputs.json_object": honoured("true: a JSON object"),
    "structured_outputs.regex": honoured("a regular expression that matches the whole text; no lookaround"),
    "structured_outputs.choice": honoured("one of these texts"),
    "structured_outputs.grammar": honoured("a Lark grammar, as llguidance reads it"),
    "fan_out": honoured("extension: steers the choices of one request while they run"),
    "fan_out.on_error": honoured("`fail`: a failing choice fails the request; `isolate`: it ends alone"),
    "fan_out.stop_after": honoured("once so many choices of a prompt have ended by themselves the rest is cancelled"),
    "fan_out.keep_unfinished": honoured("false leaves out what was cancelled; not streamed"),
    "fan_out.rank_by": honoured("`logprob`: best first by mean logprob; not streamed"),
    "fan_out.keep": honoured("the best so many of each prompt; with `rank_by`"),
    "fan_out.agree": honoured("once so many choices of a prompt give the same answer the rest is cancelled"),
    "fan_out.agree.on": honoured("`text`: all of it; `json_pointer`: a value in it; `regex`: first group of a match"),
    "fan_out.agree.value": honoured("the JSON pointer (RFC 6901) or the regex (RE2)"),
    "fan_out.agree.count": honoured("how many must agree"),
    "fan_out.details": honoured("adds seed, cached tokens, times and mean logprob to each choice"),
}

_NAME = honoured("given to the chat template")
_TEXT_PARTS = {
    ".content": honoured("text, or text parts; parts are joined by line breaks"),
    ".content[text]": honoured("a text part"),
    ".content[text].type": honoured("the kind of part"),
    ".content[text].text": honoured("its text"),
    ".content[text].prompt_cache_breakpoint": no_op("every prefix is cached"),
}
_ONLY_TEXT = refused("only text parts are supported")


def _message(role: str, note: str, more: Mapping[str, FieldRule]) -> dict[str, FieldRule]:
    fields = {"": honoured(note), ".role": honoured("who speaks"), ".name": _NAME, **_TEXT_PARTS, **more}
    return {f"messages[{role}]{suffix}": rule for suffix, rule in fields.items()}


_TOOLS = "`tools` is its newer name"
_CUSTOM = "custom tools are not supported; functions are"
_PARSED = "`{}` counts; openai-python adds it to answers that it parses"
_TEXT_ONLY = "this server takes and makes text only"

CHAT_FIELDS: Mapping[str, FieldRule] = {
    **SHARED,
    "messages": honoured("the conversation"),
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
            ".refusal": honoured("stands in for content where that is null"),
            ".reasoning_content": honoured("extension: given to the chat template"),
            ".annotations": no_op("citations are not part of the prompt"),
            ".audio": refused(_TEXT_ONLY),
            ".parsed": no_op(_PARSED.format("content")),
            ".tool_calls": honoured("calls of an earlier answer"),
            ".tool_calls[function]": honoured("a call"),
            ".tool_calls[function].type": honoured("the kind of call"),
            ".tool_calls[function].id": honoured("given to the chat template"),
            ".tool_calls[function].index": no_op("the order of the list counts; the client's stream helper keeps it"),
            ".tool_calls[function].function": honoured("what was called"),
            ".tool_calls[function].function.name": honoured("the function"),
            ".tool_calls[function].function.arguments": honoured("JSON; the chat template gets it as an object"),
            ".tool_calls[function].function.parsed_arguments": no_op(_PARSED.format("arguments")),
            ".tool_calls[custom]": refused(_CUSTOM),
            ".function_call": honoured("as a tool call; the older form"),
            ".function_call.name": honoured("the function"),
            ".function_call.arguments": honoured("JSON; the chat template gets it as an object"),
            ".function_call.parsed_arguments": no_op(_PARSED.format("arguments")),
        },
    ),
    **_message("tool", "what a call gave", {".tool_call_id": honoured("given to the chat template")}),
    "messages[function]": honoured("rendered as a tool message; the older form"),
    "messages[function].role": honoured("who speaks"),
    "messages[function].content": honoured("text"),
    "messages[function].name": _NAME,
    "max_completion_tokens": honoured("the newer name of max_tokens; they must agree when both are given"),
    "metadata": no_op("nothing is stored"),
    "parallel_tool_calls": honoured("false: one call at most, behind which a choice ends"),
    "prediction": no_op("a hint that may only change the speed"),
    "prompt_cache_key": no_op("every prefix is cached"),
    "prompt_cache_options": no_op("every prefix is cached"),
    "prompt_cache_retention": no_op("every prefix is cached"),
    "safety_identifier": no_op("nothing is kept about users"),
    "store": no_op("nothing is stored"),
    "audio": refused(_TEXT_ONLY),
    "function_call": refused(_TOOLS, "none", "auto"),
    "functions": refused(_TOOLS, []),
    "logprobs": honoured("of every token, as the model itself gives it: before temperature, bias and penalties"),
    "modalities": refused(_TEXT_ONLY, ["text"]),
    "moderation": refused("there is no moderation here"),
    "reasoning_effort": honoured("for models whose chat template knows it; none: no reasoning"),
    "chat_template": honoured(
        "extension: the client's own, up to 64 KiB; only where `CHORUS_TRUST_REQUEST_CHAT_TEMPLATE` allows it"
    ),
    "chat_template_kwargs": honoured("extension: variables of the chat template, where it knows them"),
    "chat_template_kwargs.enable_thinking": honoured("whether the model reasons"),
    "chat_template_kwargs.thinking": honoured("whether the model reasons"),
    "add_generation_prompt": honoured("extension: false leaves it to the model whose turn it is"),
    "continue_final_message": honoured("extension: the answer goes on with the last message, an assistant's"),
    "response_format": honoured("what the text must be"),
    **{
        f"response_format[{kind}]{suffix}": honoured(note)
        for kind, note in {
            "text": "any text",
            "json_object": "a JSON object",
            "json_schema": "JSON that a schema accepts",
        }.items()
        for suffix in ("", ".type")
    },
    "response_format[json_schema].json_schema": honoured("the schema and its name"),
    "response_format[json_schema].json_schema.name": no_op("a label"),
    "response_format[json_schema].json_schema.description": no_op("a label"),
    "response_format[json_schema].json_schema.strict": no_op("every schema is enforced"),
    "response_format[json_schema].json_schema.schema": honoured("enforced whole; an unsupported keyword is refused"),
    "service_tier": refused("there is one tier", "auto", "default"),
    "tool_choice": honoured("none: no tools are shown; required and named calls are enforced, whatever the model"),
    "tool_choice[function]": honoured("this one is called, once, and the choice ends in `stop`"),
    "tool_choice[function].type": honoured("the kind of tool"),
    "tool_choice[function].function": honoured("which"),
    "tool_choice[function].function.name": honoured("one of the tools'"),
    "tool_choice[allowed_tools]": honoured("all tools are shown, these may be called"),
    "tool_choice[allowed_tools].type": honoured("the kind of choice"),
    "tool_choice[allowed_tools].allowed_tools": honoured("which, and whether one must be called"),
    "tool_choice[allowed_tools].allowed_tools.mode": honoured("auto or required"),
    "tool_choice[allowed_tools].allowed_tools.tools": honoured("named as in `tool_choice`"),
    "tool_choice[allowed_tools].allowed_tools.tools[function]": honoured("a tool"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].type": honoured("the kind of tool"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].function": honoured("which"),
    "tool_choice[allowed_tools].allowed_tools.tools[function].function.name": honoured("one of the tools'"),
    "tool_choice[custom]": refused(_CUSTOM),
    "tools": honoured("up to 128; shown as text, to be called by `<tool_call>`, where the chat template knows none"),
    "tools[function]": honoured("a function"),
    "tools[function].type": honoured("the kind of tool"),
    "tools[function].function": honoured("what it is"),
    "tools[function].function.name": honoured("how calls name it"),
    "tools[function].function.description": honoured("given to the chat template"),
    "tools[function].function.parameters": honoured(
        "the schema of its arguments: for the template, and enforced in required, named and strict calls"
    ),
    "tools[function].function.strict": honoured(
        "true: the schema is checked, and calls that the model makes by itself follow it too, if it marks them as "
        "hermes does (`<tool_call>`)"
    ),
    "tools[custom]": refused(_CUSTOM),
    "top_logprobs": honoured("0 to 20; needs `logprobs`"),
    "verbosity": refused("verbosity cannot be set", "medium"),
    "web_search_options": refused("there is no web search here"),
}

COMPLETION_FIELDS: Mapping[str, FieldRule] = {
    **SHARED,
    "prompt": honoured("text, token ids, or a list of either; special tokens in text are parsed"),
    "best_of": honoured("n to 128: as many are drawn, the n best by mean logprob returned; not streamed"),
    "echo": honoured("the prompt before each answer; with `logprobs` those of its tokens too"),
    "logprobs": honoured("0 to 5 likeliest tokens beside the drawn one"),
    "suffix": honoured("what follows the answer, for models whose tokenizer has fill-in-the-middle tokens"),
}
