"""Tools of a server of the Model Context Protocol, which this process starts and speaks to over its standard streams.

The package `mcp` is needed by those who use this alone: the extra `mcp`. A server is started for each episode, for what
one episode does to it another must not see; one that only reads may be shared: hand its `tools` to ToolEpisode. A call
is made once and never repeated. Where the run shows no images, an image is read as `[image]`; what else is no text is
named so in any. Bounds: START_S for a server to say its tools, CALL_S for a call, CLOSE_S for its end.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.types import ContentBlock, ImageContent, PaginatedRequestParams, TextContent

from rolecall.environment.env import Image, Opening, Task, Tool
from rolecall.environment.tools.episode import Result, ToolEpisode
from rolecall.errors import EpisodeLostError
from rolecall.scoring.scores import Score

logger = logging.getLogger(__name__)

START_S = 30.0
"""Longest time until a server has said its tools."""
CALL_S = 20.0
"""Longest time of a call; past it the episode is lost, for the server may still be at it."""
CLOSE_S = 5.0
"""Longest wait for a server's end."""


class McpServer:
    """A running server. `close` ends it; so does the end of this process, which closes its streams."""

    def __init__(self, command: Sequence[str], start_s: float = START_S, *, shows_images: bool = False) -> None:
        """Starts `command` and asks for its tools. `shows_images`: those that they answer are shown, for runs with
        environments.*.max_image_bytes. EpisodeLostError when it does not say its tools within `start_s`.
        """
        self._shows_images = shows_images
        self._parameters = StdioServerParameters(command=command[0], args=list(command[1:]))
        self._ready: concurrent.futures.Future[tuple[McpTool, ...]] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)
        self._thread.start()
        try:
            self.tools = self._ready.result(start_s)
            """What the server offers."""
        except Exception as error:  # the entry point of a process that is not ours
            self.close()
            raise EpisodeLostError(f"the MCP server {command[0]} did not start: {error!r}") from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """A tool's result, which says itself where it failed. EpisodeLostError when there is none."""
        asked = asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)
        try:
            return asked.result(CALL_S)
        except Exception as error:  # the entry point of a process that is not ours
            asked.cancel()
            raise EpisodeLostError(f"the MCP server did not answer a call of {name}: {error!r}") from error

    def close(self) -> None:
        """Ends the server, wherever it stands. Idempotent."""
        with contextlib.suppress(RuntimeError):  # its loop has ended by itself
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            logger.debug("an MCP server was ended")
        except Exception as error:  # the entry point of a thread
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Speaks to the server for as long as it is needed."""
        async with stdio_client(self._parameters) as streams, ClientSession(*streams) as session:
            await session.initialize()  # bounded: by START_S of whoever waits
            self._session = session
            self._ready.set_result(await self._listed(session))
            await self._loop.create_future()  # bounded: by the episode, whose end cancels it

    async def _listed(self, session: ClientSession) -> "tuple[McpTool, ...]":
        found: list[McpTool] = []
        cursor: str | None = None
        while True:
            # bounded: by START_S of whoever waits
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            found += [McpTool(Tool(tool.name, tool.description or "", tool.input_schema), self) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tuple(found)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        # bounded: by the timeout that it is given
        result = await self._session.call_tool(name, dict(arguments), read_timeout_seconds=CALL_S)
        shown = [self._shown(part) for part in result.content]
        texts = [part for part in shown if isinstance(part, str)]
        if len(texts) == len(shown):
            return f"error: {''.join(texts)}" if result.is_error else "\n".join(texts)
        apart = [piece for part in shown for piece in ("\n", part)][1:]
        return ["error: ", *apart] if result.is_error else apart

    def _shown(self, part: ContentBlock) -> str | Image:
        if isinstance(part, ImageContent) and self._shows_images:
            return Image(base64.b64decode(part.data, validate=True), part.mime_type)
        return part.text if isinstance(part, TextContent) else f"[{part.type}]"


@dataclass(frozen=True)
class McpTool:
    """One tool of a server."""

    tool: Tool
    server: McpServer

    def call(self, arguments: Mapping[str, Any]) -> Result:
        """Implements CallableTool.call."""
        return self.server.call(self.tool.name, arguments)


class McpEpisode(ToolEpisode):
    """An episode with the tools of a server of its own."""

    def __init__(self, command: Sequence[str], reward: Callable[[Task, str], float | Score]) -> None:
        """`command` starts the server."""
        super().__init__((), reward)
        self._command = command
        self._server: McpServer | None = None

    def reset(self, task: Task, seed: int) -> Opening:
        """Starts the server and shows its tools."""
        self._server = McpServer(self._command, shows_images=self.shows_images)
        self._tools = {tool.tool.name: tool for tool in self._server.tools}
        return super().reset(task, seed)

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()
