"""Generated stubs of proto/rolecall/v1. Made by `make proto`; never edited by hand, this file apart, which says what to install when they do not load. The files of `rolecall protos` lie beside them, as links, for the wheel."""

from rolecall.errors import ConfigError

PROTOBUF = "protobuf>=6.33.5,<8"
"""What the stubs run on."""

try:
    from google.protobuf import runtime_version
except ImportError as error:
    raise ConfigError(f"the installed protobuf is too old for RoleCall's stubs ({error}); run: pip install '{PROTOBUF}'") from error

try:
    from rolecall.v1 import tensor_pb2 as _any
except runtime_version.VersionError as error:
    raise ConfigError(f"the installed protobuf does not fit RoleCall's stubs; run: pip install '{PROTOBUF}' ({error})") from error

del _any
