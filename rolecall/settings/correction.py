"""The section of the off-policy correction."""

from pydantic import PositiveFloat

from rolecall.settings.section import Section


class CorrectionSection(Section):
    """Truncated importance sampling of sampler against trainer (design section 6): weight min(old / rollout, cap) per token."""

    tis_cap: PositiveFloat = 2.0
    """Upper bound of the weight."""
