"""An MCP server with one tool, which agents start."""

from asked import SUNNY
from mcp.server import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("weather")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def get_weather(city: str) -> str:
    """The weather in a city"""
    return SUNNY


server.run()
