"""The measures of what requests take of an engine, as its rollout shows them and the controller adds them up."""

from rolecall.telemetry import Metrics
from rolecall.v1 import rollout_pb2


def use_metrics(use: rollout_pb2.EngineUse) -> Metrics:
    """The numbers of one engine, which combine over a fleet."""
    metrics = Metrics()
    metrics.sum("rollout/running_requests", use.num_running)
    metrics.sum("rollout/waiting_requests", use.num_waiting)
    metrics.max("rollout/kv_cache_usage", use.kv_cache_usage)
    metrics.sum("rollout/preemptions", use.num_preemptions)
    if use.num_prompt_tokens:
        hit_rate = use.num_cached_tokens / use.num_prompt_tokens
        metrics.mean("rollout/prefix_cache_hit_rate", hit_rate, use.num_prompt_tokens)
    return metrics
