"""The choice of the prompts that an epoch visits, by how often they were answered rightly of late.

No numpy, no clock, no draw: a pure function of seed, epoch and rates.

Off by default. A rate that was lost only means that its prompt is visited as if it were new.
"""

import hashlib

from rolecall.settings import CurriculumSection

RATE_MEMORY = 0.5
"""Weight of the rate so far when a visit adds its own: the last visit counts most, and no single one decides."""


def is_visited(section: CurriculumSection, seed: int, epoch: int, uid: str, success_rate: float | None) -> bool:
    """Whether epoch `epoch` visits prompt `uid`: always when its rate is unknown or inside the band, else in one epoch
    of revisit_epochs.

    That one is another for each prompt, so an epoch has about its share of them, and whatever the rates each prompt
    comes within revisit_epochs epochs.
    """
    if success_rate is None or section.min_success_rate <= success_rate <= section.max_success_rate:
        return True
    turn = int.from_bytes(hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest(), "big")
    return (epoch + turn) % section.revisit_epochs == 0


def updated_rate(rate: float | None, visit_rate: float) -> float:
    """The rate after a visit whose share of right answers was `visit_rate`: an exponential moving average, which begins
    at its first value.
    """
    return visit_rate if rate is None else RATE_MEMORY * rate + (1 - RATE_MEMORY) * visit_rate
