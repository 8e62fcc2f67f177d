"""The evaluation: that it takes place, and that its sets can be played and scored."""

from rolecall.settings.run_sections import RunSections

_MAX_SET_NAME_CHARS = 200
"""Characters of a held-out set's name where sessions of an environment are named after it: those have up to 512."""


def check_images(settings: RunSections) -> None:
    """ValueError where a scorer would read images of held-out episodes that are not kept."""
    seeing = sorted(name for name, component in settings.reward.components.items() if component.reads_images)
    if settings.max_environment_image_bytes and settings.evaluation.sets and seeing:
        raise ValueError(
            f"reward.components.{seeing[0]} reads images, and of held-out episodes those that the environment "
            "showed are not kept (environments.*.max_image_bytes); leave out evaluation.sets, or its images"
        )


def check_set_names(settings: RunSections) -> None:
    """ValueError where the name of a held-out set cannot stand in the name of a session."""
    for name in settings.evaluation.sets if settings.environments else ():
        if not (name.isascii() and name.isprintable() and len(name) <= _MAX_SET_NAME_CHARS):
            raise ValueError(
                f"evaluation.sets: {name!r} stands in the names of environments' sessions, which are printable "
                f"ASCII; give it at most {_MAX_SET_NAME_CHARS} such characters"
            )


def check_times(settings: RunSections) -> None:
    """ValueError where the evaluation would take place at no time, or while rollouts sleep."""
    if not settings.evaluation.at_start and settings.run.num_steps == 0:
        raise ValueError(
            "evaluation.at_start: a run of no steps is its evaluation, at step 0, which this leaves out; remove "
            "it, or raise run.num_steps"
        )
    if settings.evaluation.beside and settings.takes_shifts:
        raise ValueError(
            "evaluation.beside: rollouts sleep while the trainers work (rollout.sleep_mode, which follows from "
            "shared devices); leave beside out, or give rollouts devices of their own"
        )
