"""The sizes that must fit each other: of batches, trajectories and schedules."""

from rolecall.settings.algorithm.kl import KL_ERROR_BOUND
from rolecall.settings.run_sections import RunSections
from rolecall.settings.trainers import TrainerSection


def check_batches(settings: RunSections) -> None:
    """ValueError where a batch has too few responses for its mini-batches, its estimator or its KL."""
    rows = settings.algorithm.groups_per_batch * settings.sampling.num_responses
    if rows < settings.algorithm.num_minibatches:
        raise ValueError(
            f"algorithm.num_minibatches {settings.algorithm.num_minibatches} exceeds the batch's {rows} trajectories; "
            "lower it"
        )
    if (
        settings.critic is not None
        and settings.critic.num_minibatches is not None
        and rows < settings.critic.num_minibatches
    ):
        raise ValueError(
            f"critic.num_minibatches {settings.critic.num_minibatches} exceeds the batch's {rows} trajectories; "
            "lower it"
        )
    is_task_trained = settings.algorithm.distillation is None or settings.algorithm.distillation.task_coef > 0
    if is_task_trained and settings.algorithm.advantage.compares_responses and settings.sampling.num_responses < 2:
        raise ValueError(
            f"sampling.num_responses must be at least 2: {settings.algorithm.advantage.kind} compares responses "
            "within a group"
        )
    adaptive = settings.algorithm.kl.adaptive if settings.algorithm.kl is not None else None
    if adaptive is not None and rows * KL_ERROR_BOUND >= adaptive.horizon:
        raise ValueError(
            f"algorithm.kl.adaptive.horizon {adaptive.horizon}: one step of {rows} responses could take kl_coef "
            "to 0, where it stays; raise it above "
            f"{rows * KL_ERROR_BOUND:g}"
        )


def check_trajectories(settings: RunSections) -> None:
    """ValueError where the longest trajectory exceeds the memory or the row that it needs."""
    longest = settings.conversation_tokens
    trainers: dict[str, TrainerSection] = {
        "actor": settings.actor,
        **{f"references.{name}": section for name, section in settings.references.items()},
    }
    trainers |= {"critic": settings.critic} if settings.critic else {}
    for role, section in trainers.items():
        if section.token_budget < longest:
            raise ValueError(
                f"{role}.token_budget {section.token_budget} is less than the longest trajectory, "
                "data.max_prompt_tokens + sampling.max_tokens = "
                f"{longest}; raise it, or lower one of them"
            )
    for name, environment in settings.environments.items():
        num_tokens, setting = settings.episode_tokens(environment), f"environments.{name}.max_row_tokens"
        if num_tokens < longest:
            raise ValueError(
                f"{setting} {num_tokens} is less than one conversation, data.max_prompt_tokens + sampling.max_tokens = "
                f"{longest}; raise it"
            )
        if num_tokens > settings.actor.token_budget and settings.algorithm.sees_trajectories:
            raise ValueError(
                f"{setting} {num_tokens} exceeds actor.token_budget {settings.actor.token_budget}, and the loss needs "
                "a whole trajectory in one microbatch (aggregation seq_mean_token_mean, a loss or correction of "
                "sequences, or one of your own); lower it, or raise the budget"
            )


def check_epochs(settings: RunSections) -> None:
    """ValueError where the run ends after epochs whose prompts nobody can count before."""
    if settings.run.num_epochs is not None and settings.algorithm.curriculum is not None:
        raise ValueError(
            "run.num_epochs: with algorithm.curriculum an epoch leaves out the prompts whose turn it is not, which "
            "nobody knows before; give run.num_steps"
        )


def check_schedules(settings: RunSections) -> None:
    """ValueError where warm-up and decay take more steps than the run has, as far as those are known."""
    if settings.run.num_steps is None:
        return  # checked once the prompts are counted
    if settings.critic and 0 < settings.run.num_steps <= settings.critic.warmup_steps:
        raise ValueError(
            f"critic.warmup_steps {settings.critic.warmup_steps} leaves the policy none of run.num_steps "
            f"{settings.run.num_steps}; lower it, or raise run.num_steps"
        )
    for role, optimizer, num_updates in settings.trained_by:
        if optimizer.fault is not None:
            raise ValueError(f"{role}.optimizer: {optimizer.fault} (what it leaves out follows actor.optimizer)")
        num_changing = optimizer.warmup_steps + (optimizer.decay_steps or 0)
        if optimizer.decay_steps and num_changing > num_updates:
            raise ValueError(
                f"{role}.optimizer.warmup_steps + decay_steps = {num_changing} exceed the run's {num_updates} "
                "optimizer steps "
                "(run.num_steps x num_minibatches x num_epochs, less critic.warmup_steps for the actor); shorten "
                "them"
            )
