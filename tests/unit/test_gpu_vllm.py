"""A library keeps its size and the device code of one kind of GPU."""

import struct
import tarfile
import zipfile
from pathlib import Path

from tools.gpu_vllm import pack, pruned

PTX, BINARY = 1, 2
WANTED = b"bfloat16, heads of 64: ELi64ENS7_10bfloat16_t"


def entry(kind: int, arch: int, code: bytes) -> bytes:
    return struct.pack("<HHIQIIIIIIQQQ", kind, 0x101, 72, len(code), 0, 0, 0, arch, 0, 0, 0, 0, 0) + bytes(8) + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_code_of_other_gpus_is_zeros_and_all_else_is_left() -> None:
    wrapper = struct.pack("<IHHQ", 0xBA55ED50, 7, 3, 99)  # the same four bytes, of something else
    host = b"host code " + wrapper
    first = [entry(PTX, 90, b"ptx of 90"), entry(BINARY, 80, b"code of 80"), entry(BINARY, 90, b"code of 90")]
    second = [entry(BINARY, 100, b"code of 100")]
    library = host + fat_binary(*first) + b"between" + fat_binary(*second) + b"end"
    found = pruned("vllm/_C.abi3.so", library, 90)
    expected = library
    for gone in (b"ptx of 90", b"code of 80", b"code of 100"):
        expected = expected.replace(gone, bytes(len(gone)))
    assert found == expected


def test_of_attention_kernels_few_are_kept_and_helpers_all() -> None:
    kinds = [b"ELi128ENS_6half_t", b"ELi256ENS7_10bfloat16_t", b"ELi64ENS_12float_e4m3_t", WANTED, b"combines parts"]
    library = b"".join(fat_binary(entry(BINARY, 90, kind)) for kind in kinds)
    found = pruned("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", library, 90)
    assert [kind in found for kind in kinds] == [False, False, False, True, True]
    assert len(found) == len(library)
    assert pruned("vllm/_C.abi3.so", library, 90) == library


def test_what_is_run_of_a_wheel_may_be_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "store-1.0-py3-none-any.whl", "w") as wheel:
        for name, mode in {"store/server": 0o755, "store/__init__.py": 0o644, "store/types.pyi": 0o644}.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            wheel.writestr(member, "")
    pack(set(), 90, tmp_path, tmp_path / "all.tar.xz")
    with tarfile.open(tmp_path / "all.tar.xz") as tar:
        assert {member.name: member.mode for member in tar} == {"store/server": 0o755, "store/__init__.py": 0o644}
