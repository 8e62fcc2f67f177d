"""The launcher's questions to a store: one that waits for its disk is waited for, one that hangs is not."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from rolecall.launcher import probes
from rolecall.launcher.probes import Probes
from rolecall.settings import RunSettings
from rolecall.store.embedded import EmbeddedStore
from tests.smallest import smallest_tree

SERVER = f"""#!{sys.executable}
import ctypes, socket, sys, threading, time
path = next(line.split('"')[1] for line in sys.stdin if line.startswith("unixsocket "))
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
def serve(link):
    while data := link.recv(65536):
        link.sendall(b"+PONG\\r\\n" if b"PING" in data else b"+OK\\r\\n" * data.count(b"*"))
        if b"PING" in data:
            return
serve(server.accept()[0])
ctypes.CDLL(None).vfork()  # the kernel lets go of the one that calls it when the other has ended, as after a sync
time.sleep(600)
"""
"""Answers one ping, then waits in the kernel for its child."""


async def test_a_store_that_waits_for_its_disk_is_waited_for(
    make_embedded_store: Callable[..., EmbeddedStore], tmp_path: Path
) -> None:
    binary = tmp_path / "server"
    binary.write_text(SERVER)
    binary.chmod(0o755)
    store = make_embedded_store(binary=str(binary))
    unanswered, condemned = asyncio.Semaphore(0), asyncio.Event()
    loop, ping = asyncio.get_running_loop(), store.ping

    def counted() -> None:
        try:
            ping()
        finally:
            loop.call_soon_threadsafe(unanswered.release)

    store.ping = counted  # type: ignore[method-assign]
    asked = Probes(RunSettings.model_validate(smallest_tree(tmp_path)), lambda *_: condemned.set())
    store.spawn()
    asked.ask_store("store", store)
    try:
        async with asyncio.timeout(120):
            for _ in range(int(2 * probes.MAX_STORE_SILENCE_S / probes.STORE_PROBE_S)):
                await unanswered.acquire()
            assert not condemned.is_set()
            assert store.pid is not None
            [child] = psutil.Process(store.pid).children()
            os.kill(store.pid, signal.SIGSTOP)  # from then on it hangs
            child.kill()
            await condemned.wait()
    finally:
        asked.end("store")
        store.kill()
