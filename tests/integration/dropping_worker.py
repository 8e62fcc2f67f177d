"""A worker of vLLM's engine that can be told to lose a tensor on its way into the model. It plants nothing else."""

from services.rollout.vllm.worker import RolloutWorker


class DroppingWorker(RolloutWorker):
    """The product's extension, with a fault to plant."""

    rank: int

    def drop(self, name: str, rank: int) -> None:
        """From now on worker `rank` drops the tensor called `name` from every load; another call replaces it."""
        if self.rank == rank:
            model = self.model_runner.model
            load = type(model).load_weights
            model.load_weights = lambda named: load(model, [item for item in named if item[0] != name])
