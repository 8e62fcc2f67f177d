"""Holds the packages of the light image to what its roles do with them, after all else was taken away.

Reads Parquet and pictures, judges mathematics, makes clients of S3 and of a server, a key of a certificate, an event of
TensorBoard and a tokenizer. The build runs it, and fails where it fails.
"""

import math
import sys
import tempfile
from pathlib import Path

import grpc
import redis.asyncio
import rich.console
import rich.live
import rich.progress_bar
import rich.table
import s3fs
from cryptography.hazmat.primitives.asymmetric import ec
from math_verify import parse, verify
from PIL import Image
from pyarrow import ArrowInvalid, Table, parquet
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.tokenization_utils_tokenizers import TokenizersBackend

ROWS = [
    {"prompt": "2 3 1", "answer": ["1", "2"], "meta": {"level": 3}, "weight": 0.5},
    {"prompt": "\u03c0", "answer": [], "meta": None, "weight": math.pi},
]
EQUAL = [
    ("$\\frac{1}{2}$", "0.5"),
    ("$x^2+2x+1$", "$(x+1)^2$"),
    ("$[0,1)$", "$[0,1)$"),
    ("$\\int_0^1 x dx$", "0.5"),
    ("$x<3$", "$3>x$"),
]


def check(folder: Path) -> None:
    """Does everything once, in `folder`. AssertionError, or whatever a library raises that lacks a part."""
    for compression in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
        parquet.write_table(Table.from_pylist(ROWS), folder / "rows.parquet", compression=compression)
        assert parquet.read_table(folder / "rows.parquet").to_pylist() == ROWS, compression
    (folder / "no.parquet").write_text("no")
    try:
        parquet.read_table(folder / "no.parquet")
    except ArrowInvalid:
        pass
    else:
        raise AssertionError("Arrow read what is not Parquet")
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        Image.new("RGB", (3, 2), "red").save(folder / "picture", kind)
        with Image.open(folder / "picture") as picture:
            assert picture.convert("RGB").size == (3, 2), kind
    for gold, answer in EQUAL:
        assert verify(parse(gold), parse(answer)), gold
    assert not verify(parse("$3$"), parse("$4$"))
    s3fs.S3FileSystem(key="k", secret="s", skip_instance_cache=True)
    ec.generate_private_key(ec.SECP256R1())
    grpc.insecure_channel("localhost:1").close()
    redis.asyncio.Redis.from_url("rediss://localhost:1")
    rich.console.Console(file=sys.stderr).print(rich.table.Table("checked"))
    with (folder / "events").open("wb") as file:
        RecordWriter(file).write(Event(step=1).SerializeToString())
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert TokenizersBackend(tokenizer_object=tokenizer).encode("a") == [0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        check(Path(made))
