"""An S3 server of its own on this machine, with an empty bucket."""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Its URL; the environment names the server while it lasts."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**variables, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
                patch.setenv(name, value)
            s3 = fsspec.filesystem("s3", skip_instance_cache=True)
            bucket = f"checkpoints-{uuid.uuid4().hex[:8]}"  # all servers of a process share their buckets
            s3.mkdir(bucket)
            yield f"s3://{bucket}"
            fsspec.filesystem("s3").clear_instance_cache()
    finally:
        server.stop()
