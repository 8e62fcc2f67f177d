"""NCCL by its C interface: a communicator that can be given up without ending the process.

Owns the few calls a broadcast channel needs, found in the NCCL library that torch itself loaded. Everything is
non-blocking and polled, so that each wait has a deadline and another thread may abort. Needs a CUDA build of torch; no
vLLM and no default process group.
"""

import ctypes
import threading
import time
from pathlib import Path

import torch

from rolecall.errors import ChannelBrokenError, NotOnThisDeviceError
from rolecall.weights.rendezvous import Rendezvous

_UINT8 = 1
_SUCCESS, _IN_PROGRESS = 0, 7
_UNDEFINED = -(2**31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21800
_POLL_S = 0.001


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18; a newer library reads its size and version and takes its own defaults for the rest."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


class NcclLibrary:
    """The library with its signatures. NotOnThisDeviceError when torch came without one."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(str(_library_path()))
        except OSError as error:
            raise NotOnThisDeviceError(
                f"torch's NCCL library cannot be loaded ({error}); use weights.backend: gloo"
            ) from error
        comm = ctypes.c_void_p
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
        self._library.ncclCommInitRankConfig.argtypes = [
            ctypes.POINTER(comm),
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        ]
        self._library.ncclCommGetAsyncError.argtypes = [comm, ctypes.POINTER(ctypes.c_int)]
        self._library.ncclBroadcast.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            comm,
            ctypes.c_void_p,
        ]
        self._library.ncclCommAbort.argtypes = [comm]

    def unique_id(self) -> bytes:
        """A new communicator's id, 128 bytes, to be told to every rank."""
        unique = _UniqueId()
        self.check(self._library.ncclGetUniqueId(ctypes.byref(unique)))
        return bytes(unique)

    def begin_init(self, unique_id: bytes, rank: int, world_size: int) -> ctypes.c_void_p:
        """Starts to meet the other ranks; poll `is_settled`."""
        comm = ctypes.c_void_p()
        config = _Config(
            ctypes.sizeof(_Config),
            _CONFIG_MAGIC,
            _CONFIG_VERSION,
            0,
            _UNDEFINED,
            _UNDEFINED,
            _UNDEFINED,
            None,
            _UNDEFINED,
        )
        unique = _UniqueId.from_buffer_copy(unique_id)
        self.check(
            self._library.ncclCommInitRankConfig(ctypes.byref(comm), world_size, unique, rank, ctypes.byref(config))
        )
        return comm

    def is_settled(self, comm: ctypes.c_void_p) -> bool:
        """Whether the last call on `comm` has been taken; ChannelBrokenError when the communicator has failed."""
        state = ctypes.c_int()
        self.check(self._library.ncclCommGetAsyncError(comm, ctypes.byref(state)))
        self.check(state.value)
        return state.value == _SUCCESS

    def broadcast(self, bucket: torch.Tensor, comm: ctypes.c_void_p, stream: torch.cuda.Stream) -> None:
        """Enqueues a broadcast of `bucket` (uint8 [n], CUDA) from rank 0; poll `is_settled` before the next call."""
        pointer = bucket.data_ptr()
        self.check(self._library.ncclBroadcast(pointer, pointer, bucket.numel(), _UINT8, 0, comm, stream.cuda_stream))

    def abort(self, comm: ctypes.c_void_p) -> None:
        """Gives `comm` up; whatever it runs on the device ends."""
        self._library.ncclCommAbort(comm)

    def check(self, code: int) -> None:
        """ChannelBrokenError for any code but success and in-progress."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise ChannelBrokenError(f"NCCL: {self._library.ncclGetErrorString(code).decode()}; open a new epoch")


class NcclChannel:
    """A raw NCCL communicator on a stream of its own. Buckets lie on the GPU."""

    takes_deltas = False

    def __init__(self, rendezvous: Rendezvous, world_size: int, device: torch.device, timeout_s: float) -> None:
        """Meets the other ranks, as rolecall.weights.channel.join says."""
        self.rendezvous, self.world_size, self.device = rendezvous, world_size, device
        self._library = NcclLibrary()
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if rendezvous.rank == 0:
                rendezvous.offer("comm/nccl", self._library.unique_id())
            unique_id = rendezvous.take("comm/nccl", timeout_s)
            self._comm: ctypes.c_void_p | None = self._library.begin_init(unique_id, rendezvous.rank, world_size)
        rendezvous.on_broken(self.close)
        self._settle(deadline, f"the ranks did not meet within {timeout_s:g} s")

    def broadcast(self, bucket: torch.Tensor, timeout_s: float) -> "NcclTransfer":
        """Implements Channel."""
        deadline = time.monotonic() + timeout_s
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the bucket is packed there
        with self._lock, torch.cuda.device(self.device):  # bounded: held for calls that only enqueue
            if self._comm is not None:
                self._library.broadcast(bucket, self._comm, self._stream)
        # before anything can fail: the kernel may still write when the bucket is freed
        bucket.record_stream(self._stream)
        self._settle(deadline, f"a bucket took more than {timeout_s:g} s")
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        return NcclTransfer(done, self)

    def poll(self, deadline: float, late: str) -> None:
        """One look between two polls: sleeps a little; ChannelBrokenError, after aborting the epoch, when it failed or
        `deadline` (monotonic) is past.
        """
        self.rendezvous.check()
        if time.monotonic() > deadline:
            self.rendezvous.abort(late)
        self._is_settled()
        self.rendezvous.check()
        time.sleep(_POLL_S)

    def close(self) -> None:
        """Implements Channel. A communicator that was not used up must be aborted, never destroyed: destroying waits
        for the peers.
        """
        with self._lock:  # bounded: held for calls that do not wait for peers
            comm, self._comm = self._comm, None
            if comm is not None:
                self._library.abort(comm)

    def _settle(self, deadline: float, late: str) -> None:
        while not self._is_settled():
            self.poll(deadline, late)

    def _is_settled(self) -> bool:
        failure: ChannelBrokenError | None = None
        with self._lock:  # bounded: held for calls that do not wait for peers
            if self._comm is not None:
                try:
                    return self._library.is_settled(self._comm)
                except ChannelBrokenError as error:
                    failure = error
        if failure is not None:  # outside the lock: aborting closes this channel
            self.rendezvous.blame(failure.message)
        self.rendezvous.check()
        return True


class NcclTransfer:
    """An NCCL broadcast that is under way."""

    def __init__(self, done: torch.cuda.Event, channel: NcclChannel) -> None:
        self._done, self._channel = done, channel

    def wait(self, timeout_s: float) -> None:
        """Implements Transfer; afterwards the bucket may be read on the current stream."""
        deadline = time.monotonic() + timeout_s
        while not self._done.query():  # type: ignore[no-untyped-call]
            self._channel.poll(deadline, f"a bucket took more than {timeout_s:g} s")
        self._channel.rendezvous.check()


def _library_path() -> Path:
    """The library that this process's torch is linked to. Its wheel lies beside torch's, in site-packages/nvidia/nccl;
    a torch built against a system NCCL names it only to the loader.
    """
    if not torch.distributed.is_nccl_available():
        raise NotOnThisDeviceError(
            "this build of torch has no NCCL; use weights.backend: gloo, or install a CUDA build of torch"
        )
    beside = Path(torch.__file__).parent.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    return beside if beside.exists() else Path("libnccl.so.2")
