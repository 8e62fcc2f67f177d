"""The sampler as the policy that is trained: that a run can repeat itself, and that what differs is corrected."""

from rolecall.settings.run_sections import RunSections


def check_determinism(settings: RunSections) -> None:
    """ValueError where run.deterministic is asked for beside what depends on the clock or the start."""
    if settings.run.deterministic and settings.algorithm.max_staleness:
        raise ValueError(
            f"run.deterministic: with algorithm.max_staleness {settings.algorithm.max_staleness} the clock decides "
            "which weights sample a response; set max_staleness 0"
        )
    if settings.run.deterministic and settings.rollout.pause_mode == "keep_cache":
        raise ValueError(
            "run.deterministic: no response is in flight at a publish, whose keys and values rollout.pause_mode "
            "keep_cache would keep; leave one of them out (pause_mode keep where a recipe has it)"
        )
    if settings.run.deterministic and settings.algorithm.curriculum is not None:
        raise ValueError(
            "run.deterministic: with algorithm.curriculum the order in which groups are scored decides which "
            "prompts come next where one is there twice, as at the end of an epoch; leave one of them out"
        )
    if settings.run.deterministic and settings.actor.torch_compile:
        raise ValueError(
            "run.deterministic: compiled layers (actor.torch_compile) may differ in the last bit from start to "
            "start; leave one of them out"
        )


def check_correction(settings: RunSections) -> None:
    """ValueError where the rollouts' engine samples another policy, and nothing corrects for it."""
    dtype = settings.rollout.engine.get("kv_cache_dtype", "auto")
    others = [f"engine.kv_cache_dtype {dtype}"] if dtype != "auto" else []
    others += ["pause_mode keep_cache"] if settings.rollout.pause_mode == "keep_cache" else []
    correction = settings.algorithm.correction
    if others and (correction is None or not correction.corrects):
        raise ValueError(
            f"rollout.{' and rollout.'.join(others)}: makes the sampler another policy than the trainer's; set "
            "algorithm.correction to weigh or reject for it, as {weight: {kind: token, cap: 2}}"
        )


def check_router_replay(settings: RunSections) -> None:
    """ValueError where there is no routing to replay."""
    if settings.actor.router_replay == "r3" and settings.rollout.pipeline_parallel_size > 1:
        raise ValueError(
            "actor.router_replay r3: vLLM does not say which experts it samples with where "
            f"rollout.pipeline_parallel_size is {settings.rollout.pipeline_parallel_size}; make it 1 and raise "
            "rollout.tensor_parallel_size, or use r2"
        )
    if settings.actor.router_replay == "r2" and settings.algorithm.sampler_is_old:
        raise ValueError(
            "actor.router_replay r2 replays the pass that gives the old logprobs, and with "
            "algorithm.correction.proximal bypass there is none; use r3, which replays the sampler's"
        )
