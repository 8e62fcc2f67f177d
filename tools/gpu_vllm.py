"""Packs vLLM for a machine with a GPU, torch with CUDA and CPython 3.12 that reaches no package index: its CUDA wheel
with kernels of one kind of GPU alone, what it needs, and the wheels of `make gpu-wheels`, in an archive of some 55 MB.

    .venv/bin/python -m tools.gpu_vllm --have FREEZE          # what `pip list --format=freeze` says there

    tar xJf vllm.tar.xz -C SITE && export PYTHONPATH=SITE:.          # there, in this tree

vLLM's operators are built against torch's stable interface: they load in releases of torch that vLLM does not name.
"""

import argparse
import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cuda.txt"
NEWEST = {"transformers", "tokenizers", "protobuf", "pydantic", "pydantic-core"}
"""Packages that are carried though the machine has them, with those of gRPC: an older release will not do."""
LEFT_OUT = re.compile(
    r"torch.*|numba|flashinfer.*|tilelang|nvidia-.*|nvtx|fastsafetensors|instanttensor|quack-kernels|tokenspeed-mla|humming-kernels|"
    r"pynvvideocodec|fastapi-.*"
)
"""Requirements of vLLM that it does without, or that come with torch."""
DROPPED = re.compile(
    r"vllm/vllm-rs|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm/.*/_vllm_fa2_C|vllm/_(flashmla|flashmla_extension|flashkda|qutlass|"
    r"deepselect)_C|pycountry/locales/|mistral_common/data/|supervisor/skins/|.*\.pyi$|.*\.data/"
)
"""Members of wheels that only other models, GPUs or commands need."""
ATTENTION = "_vllm_fa3_C"
KEPT_ATTENTION = re.compile(rb"ELi(64|128)ENS\w?_10bfloat16_t")
"""Kernels of FlashAttention 3 that are kept: bfloat16, heads of 64 and 128. As their names have it."""
ANY_ATTENTION = re.compile(rb"ELi\d+ENS\w?_(10bfloat16|6half|12float_e4m3)_t")
THERE = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
"""What markers are read for, beside this machine."""
_MAGIC = struct.pack("<I", 0xBA55ED50)
_BINARY = 2
_MOST_BYTES = 56 * 2**20
_DOWNLOAD_S = 1800.0
_STRIP_S = 60.0


@dataclass(frozen=True)
class DeviceCode:
    """One entry of a fat binary, as nvcc puts them into a library; its layout is read off such libraries."""

    kind: int
    """1: PTX, 2: machine code."""
    arch: int
    start: int
    size: int


def fat_binaries(library: bytes | bytearray) -> Iterator[list[DeviceCode]]:
    """Yields the entries of each fat binary in `library`."""
    at = library.find(_MAGIC)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        if (version, header) != (1, 16):  # the same four bytes elsewhere
            at = library.find(_MAGIC, at + 4)
            continue
        entries, entry, end = [], at + header, at + header + size
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", library, entry)
            (arch,) = struct.unpack_from("<I", library, entry + 28)
            entries.append(DeviceCode(kind, arch, entry + entry_header, entry_size))
            entry += entry_header + entry_size
        yield entries
        at = library.find(_MAGIC, end)


def pruned(name: str, library: bytes, arch: int) -> bytes:
    """`library` of the same size with zeros, which packs to nothing, for device code of other GPUs than `arch`."""
    kept = bytearray(library)
    for entries in fat_binaries(library):
        for code in entries:
            there = slice(code.start, code.start + code.size)
            if (code.kind, code.arch) != (_BINARY, arch) or (ATTENTION in name and not _is_kept(library[there])):
                kept[there] = bytes(code.size)
    return bytes(kept)


def _is_kept(code: bytes) -> bool:
    return KEPT_ATTENTION.search(code) is not None or ANY_ATTENTION.search(code) is None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    lines = (line.split()[0] for line in LOCK.read_text().splitlines() if "==" in line and not line.startswith("#"))
    return {_normal(line.partition("==")[0]): line for line in lines}


def _package(wheel: Path) -> str:
    return _normal(wheel.name.split("-")[0])


def _download(names: list[str], folder: Path) -> None:
    pins = _pins()
    if missing := [name for name in names if name not in pins]:
        sys.exit(f"{LOCK.relative_to(ROOT)} does not pin {', '.join(missing)}; pin it, or name it in LEFT_OUT")
    platforms = [f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    tags = [word for name in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64") for word in ("--platform", name)]
    abis = [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *abis, *tags, "--dest", str(folder)]
    subprocess.run([*command, *(pins[name] for name in names)], check=True, timeout=_DOWNLOAD_S)


def _requirements(path: Path) -> set[str]:
    """Packages that the wheel needs there, less those that are left out."""
    with zipfile.ZipFile(path) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist") or []
    needed = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(THERE)]
    return {name for name in (_normal(each.name) for each in needed) if not LEFT_OUT.fullmatch(name)}


def collect(have: set[str], wheels: Path) -> None:
    """Downloads into `wheels` vLLM and all that it and they need beyond `have`."""
    wanted = {"vllm"}
    while wanted:
        print("downloading", *sorted(wanted), flush=True)
        _download(sorted(wanted), wheels)
        there = {_package(path) for path in wheels.glob("*.whl")}
        wanted = {name for path in wheels.glob("*.whl") for name in _requirements(path)} - there - have


def pack(have: set[str], arch: int, wheels: Path, archive: Path) -> None:
    """Writes the archive of all wheels in `wheels` but those of packages in `have`."""
    with tarfile.open(archive, "w:xz", preset=3) as tar:
        for path in sorted(wheels.glob("*.whl")):
            package = _package(path)
            if package in have and package not in NEWEST and not package.startswith("grpcio"):
                continue
            print(path.name, flush=True)
            with zipfile.ZipFile(path) as wheel:
                for member in wheel.infolist():
                    name = member.filename
                    if not member.is_dir() and not DROPPED.match(name):
                        mode = 0o755 if member.external_attr >> 16 & 0o100 else 0o644  # a store's server is run
                        _add(tar, name, _member(name, wheel.read(name), arch), mode)


def _member(name: str, data: bytes, arch: int) -> bytes:
    if not re.search(r"\.so(\.|$)", name):
        return data
    if name.startswith("vllm/"):
        return pruned(name, data, arch)
    if shutil.which("strip") is None:
        return data
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        subprocess.run(["strip", "--strip-unneeded", file.name], check=True, timeout=_STRIP_S)
        return Path(file.name).read_bytes()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))


def main() -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--have", type=Path, required=True, help="`pip list --format=freeze` of that machine")
    parser.add_argument("--arch", type=int, default=90, help="its GPU's compute capability, 90 for an H100")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels", help="made by `make gpu-wheels`")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-vllm" / "vllm.tar.xz")
    arguments = parser.parse_args()
    if not list(arguments.wheels.glob("*.whl")):
        parser.error(f"no wheels in {arguments.wheels}; run make gpu-wheels first")
    have = {_normal(line.partition("==")[0]) for line in arguments.have.read_text().splitlines() if "==" in line}
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        for wheel in arguments.wheels.glob("*.whl"):
            shutil.copy(wheel, wheels)
        collect(have, wheels)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        pack(have, arguments.arch, wheels, arguments.out)
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {size / 2**20:.1f} MiB")
    if size > _MOST_BYTES:
        print(f"more than {_MOST_BYTES / 2**20:.0f} MiB: leave out more of what the machine has", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
