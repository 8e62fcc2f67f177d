"""An MCP server with a counter of its own, on standard streams: what the tests of MCP tools start."""

import os

from mcp.server import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

server = MCPServer("counter")
counts = {"value": 0}


@server.tool()
def add(amount: int) -> str:
    """Adds to the counter."""
    counts["value"] += amount
    return str(counts["value"])


@server.tool()
def refuse() -> str:
    """Refuses."""
    raise ValueError("not today")


@server.tool()
def look(data: str, fails: bool = False) -> CallToolResult:
    """Shows an image between two texts."""
    image = ImageContent(data=data, mime_type="image/jpeg")
    content = [TextContent(text="before"), image, TextContent(text="after")]
    return CallToolResult(content=content, is_error=fails)


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
