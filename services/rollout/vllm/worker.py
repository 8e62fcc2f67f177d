"""The calls of the workers of a vLLM engine beside those for new weights: traces, memory, buffers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolecall.weights.receiver import WorkerExtension
from services.rollout.vllm.pass_recorder import PassRecorder


class RolloutWorker(WorkerExtension):
    """Mixed into vLLM's worker (worker_extension_cls); its methods answer `collective_rpc`, between two steps of the
    engine.
    """

    device: torch.device
    rank: int
    distributed_init_method: str
    execute_model: Callable[..., Any]
    pass_recorder: PassRecorder | None = None
    """What records its passes, while a profile is wanted."""

    def begin_trace(self, num_passes: int, path: str) -> None:
        """Records the next `num_passes` passes of the model into `<path>-rank<rank>.json.gz`."""
        file = Path(f"{path}-rank{self.rank}.json.gz")
        self.pass_recorder = PassRecorder(self.execute_model, num_passes, file, self.device)
        self.execute_model = self.pass_recorder.execute

    def trace(self) -> bytes:
        """A RankTrace once it is written or failed; empty before."""
        trace = self.pass_recorder.trace() if self.pass_recorder is not None else None
        return b"" if trace is None else trace.SerializeToString()

    def end_trace(self) -> None:
        """Records nothing more, whether it had all of it or not. Idempotent."""
        if self.pass_recorder is not None:
            self.pass_recorder.end()
            self.pass_recorder = None
            del self.execute_model

    def make_stage_buffers(self) -> None:
        """Makes what a stage of a pipeline gets its input in, on CPUs: there vLLM makes it in a first pass that it
        leaves out where nothing is compiled.
        """
        runner = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def unlink_shared_memory(self) -> None:
        """Takes the names from the memory that workers on CPUs share, which all of them have mapped once the engine is
        up: vLLM's processes end without doing so, and it would stay taken.
        """
        engine = Path(self.distributed_init_method).name
        for path in Path("/dev/shm").glob(f"{engine}-*-cpushm_*"):
            path.unlink(missing_ok=True)  # another worker may be faster

    def shared_memory(self) -> list[tuple[str, int]]:
        """Returns name and inode of the memory that it shares with the engine's other processes: vLLM's queues."""
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        paths = [Path(each) for each in mapped if each.startswith("/dev/shm/psm_")]
        return [(path.name, path.stat().st_ino) for path in paths]

    def clear_positions(self) -> None:
        """Zeroes the positions in several dimensions (M-RoPE) of a runner on GPUs, once its weights are awake: sleep of
        level 2 drops them, vLLM writes those of tokens alone, and a captured graph reads those of its padding, too.
        """
        rope = getattr(getattr(self.model_runner, "model_state", None), "rope_state", None)
        if rope is not None:
            rope.positions.zero_()

    def free_bytes(self) -> int:
        """Returns the memory of this worker's device that nobody has."""
        return int(torch.accelerator.get_memory_info()[0])
