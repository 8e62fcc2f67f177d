"""The section of a function that the user wrote."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rolecall.settings.section import ConfigPath, Section

FunctionName = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""`module:function`."""


class PluginSection(Section):
    """A function of the user's and what it is called with."""

    function: FunctionName
    """`module:function`, importable where it is called, with `search_path` at the end of the import path."""
    options: dict[str, Any] = {}
    """Keyword arguments of every call."""
    search_path: ConfigPath = Path(".")
    """Folder where the module is found; absent: the configuration file's folder."""
