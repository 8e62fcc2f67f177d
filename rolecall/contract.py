"""The contracts that this process speaks: the release, and a digest of every message and method of `rolecall.v1`.

A worker says it at Join and the controller compares: two builds of one release that differ in a field must not exchange
messages, for unknown fields are silently left out. Comments and the compiler's version do not count.
"""

import hashlib
import importlib
import pkgutil

import rolecall.v1
from rolecall import __version__

DIGEST_CHARS = 12


def contract_version() -> str:
    """`<release>+<digest>`."""
    names = sorted(module.name for module in pkgutil.iter_modules(rolecall.v1.__path__) if module.name.endswith("_pb2"))
    files = [importlib.import_module(f"rolecall.v1.{name}").DESCRIPTOR.serialized_pb for name in names]
    digests = b"".join(hashlib.sha256(file).digest() for file in files)
    return f"{__version__}+{hashlib.sha256(digests).hexdigest()[:DIGEST_CHARS]}"
