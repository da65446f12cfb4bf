"""Text of a choice to content, reasoning and tool calls: one parser per family, chosen by name.

    OutputParser(REASONING_PARSERS["think"](starts_inside=...), TOOL_PARSERS["hermes"](tools))

`feed` text as the detokeniser makes it, cut anywhere, `finish` once; both return pieces. The message that is not
streamed is the same pieces, folded.
"""

from __future__ import annotations

from service.parsers.deepseek import DeepSeekParser
from service.parsers.detect import detect
from service.parsers.hermes import HermesParser
from service.parsers.llama import LlamaJsonParser
from service.parsers.mistral import MistralParser
from service.parsers.output import OutputParser
from service.parsers.pieces import (
    ContentDelta,
    Message,
    Piece,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    fold,
    merge,
)
from service.parsers.pythonic import PythonicParser
from service.parsers.qwen3_coder import Qwen3CoderParser
from service.parsers.reasoning import MistralThinkParser, ReasoningParser, ThinkParser
from service.parsers.tool_parser import Tool, ToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek": DeepSeekParser,
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "mistral": MistralThinkParser,
    "think": ThinkParser,
}

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ContentDelta",
    "Message",
    "OutputParser",
    "Piece",
    "ReasoningDelta",
    "ReasoningParser",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolParser",
    "detect",
    "fold",
    "merge",
]
