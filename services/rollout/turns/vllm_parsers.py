"""vLLM's own parsers of tool calls, by the names that its server gives them. Their import takes seconds."""

from collections.abc import Sequence

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from rolecall.data.continuation import PROBE_TOOL
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import ConfigError
from services.rollout.turns.tool_calls import ReadCalls, ToolCalls, ToolSchema


def tool_calls_of(parser: str, tokenizer: ChatTokenizer) -> ToolCalls:
    """The reader of a run's calls by vLLM's parser of this name. ConfigError when that cannot be used."""
    return ToolCalls(tokenizer, reader_of(parser, tokenizer), parser)


def reader_of(parser: str, tokenizer: ChatTokenizer) -> ReadCalls:
    """The parser that `vllm serve --tool-call-parser` has under this name. ConfigError when it has none, or one that
    does not take this tokenizer or does not read text.
    """

    def read(text: str, tools: Sequence[ToolSchema]) -> list[tuple[str, str]]:
        request = ChatCompletionRequest(messages=[], model="", tools=list(tools))
        found = made(tokenizer.backend, request.tools).extract_tool_calls(text, request)
        return [(call.function.name, call.function.arguments) for call in found.tool_calls]

    try:
        made = ToolParserManager.get_tool_parser(parser)
        read("", [PROBE_TOOL])
    except (KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(f"environments.*.tool_parser: {parser} cannot be used: {error}; name another") from error
    return read
