"""`rolecall protos`: the contracts of scorers and environments as files, from which stubs are made in any language."""

from pathlib import Path
from typing import TextIO

from google.protobuf.descriptor import FileDescriptor

from rolecall import v1
from rolecall.disk import writing
from rolecall.v1 import environment_pb2, reward_pb2


def protos(folder: Path, out: TextIO) -> int:
    """Writes the .proto files of both contracts, with those that they import, into `folder` by their import paths, over
    what is there; 0. RoleCallError when they cannot be written.
    """
    for name in sorted(_imported(reward_pb2.DESCRIPTOR) | _imported(environment_pb2.DESCRIPTOR)):
        path = folder / name
        with writing("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((Path(*v1.__path__) / path.name).read_bytes())
        out.write(f"{path}\n")
    return 0


def _imported(file: FileDescriptor) -> set[str]:
    """Import paths of a file and of those of ours that it needs; Google's come with every protoc."""
    ours = [needed for needed in file.dependencies if needed.package == file.package]
    return {file.name}.union(*map(_imported, ours))
