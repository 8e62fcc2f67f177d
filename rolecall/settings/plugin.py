"""The section of a function that the user wrote."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from rolecall.settings.section import Section, absolute, spelled


def _in_its_folder(value: object, info: Any) -> object:
    """`value` with the folder of its module, which is the configuration file's where it names none."""
    if not isinstance(value, str) or not (info.context or {}).get("base"):
        return value
    folder, _, name = value.rpartition("/")
    return f"{absolute(f'{folder}/' if value.startswith('/') else folder, info)}/{name}"


FunctionName: TypeAlias = Annotated[
    str,
    spelled(r"(.*/)?[\w.]+:\w+", "module:function or folder/module:function, as in mine:row"),
    BeforeValidator(_in_its_folder),
]
"""`module:function` or `folder/module:function`."""


class PluginSection(Section):
    """A function of the user's and what it is called with."""

    function: FunctionName
    """`module:function`, or `folder/module:function`. The module is importable where it is called, with the folder
    (absent: the configuration file's) at the end of the import path.
    """
    options: dict[str, Any] = {}
    """Keyword arguments of every call."""

    @property
    def name(self) -> str:
        """`module:function`, for people and for the import."""
        return self.function.rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """The folder in which the module is found."""
        return Path(self.function.rpartition("/")[0] or ".")
