"""How many keys a run's file has, and that each says what it means."""

from rolecall.settings import RunSettings
from tools.settings_keys import leaves

MAX_KEYS = 315
"""249 when they were last cut (ADR 44); the rest is room for new capabilities, not for new knobs of old ones. The 300th
names the parser of tool calls, the 301st where agents call the policy, the 302nd what chat templates are given, the
303rd and 304th whom an environment outside the run trusts and is trusted by, the 305th how often a lost episode is
begun again, the 306th how long an agent's row may be, the 307th whether a run that is made again ends in the same
weights, the 308th whether only what changed travels to the rollouts, the 309th and 310th how much of an environment's
answer the policy reads, and which part, the 311th whether training goes on beside an evaluation, the 312th whether
whole parameters stay from pass to pass, the 313th how many stages a rollout's layers are split into, the 314th
how many steps a critic learns before its policy does.
"""


def test_the_keys_are_few() -> None:
    assert len(list(leaves(RunSettings))) < MAX_KEYS


def test_every_key_is_documented() -> None:
    assert not [path for path, docstring in leaves(RunSettings) if not docstring]
