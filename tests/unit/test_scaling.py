"""A scaler that follows the shares of time settles where a load leads it; one that follows the backlog does not see it.

And the rules and scalers of deploy/kubernetes are those that were simulated, on names that the roles export.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import scaling
from benchmarks.scaling import (
    ENDS,
    HOUR,
    NOMINAL,
    SCENARIOS,
    Load,
    OnBacklog,
    OnShares,
    OnWait,
    Scaler,
    changes,
    phase,
    simulate,
)
from rolecall.training.serving import device_thread
from services.controller import board
from services.rollout import activity

COMPONENTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "components"
STATES = {
    "rollout": activity.STATES,
    "actor": device_thread.STATES,
    "critic": device_thread.STATES,
    "controller": board.LOOP_STATES,
}


def read(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((COMPONENTS / name).read_text())
    return tree


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("prometheus/rules.yaml")["spec"]["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("load", SCENARIOS)
def test_what_follows_the_shares_settles_near_what_the_load_needs_and_comes_back(load: str) -> None:
    other = SCENARIOS[load]
    fleet = simulate(OnShares, other, max_staleness=4)
    for needed, end in zip((NOMINAL.replicas, other.replicas, NOMINAL.replicas), ENDS, strict=True):
        least, most, _, training = phase(fleet, end)
        assert math.ceil(needed) <= least
        assert most <= math.ceil(needed / scaling.TARGET) + 1
        assert most - least <= 1
        assert training > 0.85
    assert changes(fleet) <= 16


def test_a_backlog_is_as_long_with_a_fleet_too_small_by_half_as_by_three_quarters_and_the_shares_tell_them_apart() -> (
    None
):
    backlogs, wanted = [], []
    for drop_share in (0.5, 0.75):
        fleet = simulate(Scaler, Load(drop_share=drop_share), max_staleness=4)
        end = ENDS[1] * HOUR
        backlogs.append(sum(fleet.backlog_at[end - HOUR : end]) / HOUR)
        sampling, training = (counter[end] - counter[end - HOUR] for counter in (fleet.sampling_s, fleet.training_s))
        wanted.append(sampling / training)
        assert max(fleet.backlog_at) <= (4 + 1) * scaling.GROUPS_PER_BATCH
    assert backlogs[1] < 1.1 * backlogs[0]
    assert wanted == pytest.approx([8.0, 16.0], rel=0.1)


def test_what_follows_the_backlog_has_as_many_rollouts_for_twice_the_load_where_staleness_is_small() -> None:
    twice = SCENARIOS["half of the groups are filtered"]
    fleet = simulate(OnBacklog, twice, max_staleness=1)
    assert phase(fleet, ENDS[1])[1] <= phase(fleet, ENDS[0])[1] + 1 < twice.replicas


def test_the_wait_share_alone_has_no_place_to_settle() -> None:
    """It does not fall in proportion to replicas, which the autoscaler supposes of a value."""
    fleet = simulate(OnWait, NOMINAL, max_staleness=4)
    least, most, _, _ = phase(fleet, ENDS[-1])
    assert most - least > 3


def test_the_scalers_of_deploy_are_those_that_were_simulated() -> None:
    hpa, keda = read("hpa/autoscaler.yaml")["spec"], read("keda/scaled-object.yaml")["spec"]
    (trigger,) = keda["triggers"]
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = hpa["behavior"]["scaleUp"], hpa["behavior"]["scaleDown"]
    assert up["stabilizationWindowSeconds"] == down["stabilizationWindowSeconds"] == scaling.STABLE_S
    assert up["policies"] == [{"type": "Percent", "value": 100, "periodSeconds": scaling.UP_EVERY_S}]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": scaling.DOWN_EVERY_S}]
    target = hpa["metrics"][0]["external"]["target"]
    assert (target["type"], trigger["metricType"]) == ("AverageValue", "AverageValue")
    assert target["averageValue"] == f"{scaling.TARGET * 1000:g}m"
    assert float(trigger["metadata"]["threshold"]) == scaling.TARGET
    assert hpa["minReplicas"] == keda["minReplicaCount"] == scaling.MIN_REPLICAS
    assert hpa["maxReplicas"] == keda["maxReplicaCount"] == scaling.MAX_REPLICAS
    recorded = {
        rule.get("record") for group in read("prometheus/rules.yaml")["spec"]["groups"] for rule in group["rules"]
    }
    assert trigger["metadata"]["query"].partition("{")[0] in recorded
    adapter = (COMPONENTS / "hpa" / "autoscaler.yaml").read_text()
    assert f"seriesQuery: {trigger['metadata']['query'].partition('{')[0]}\n" in adapter


def test_the_rules_ask_for_states_that_the_roles_have_over_the_window_that_was_simulated() -> None:
    asked = [
        (role, state)
        for rule in rules()
        for roles, states in re.findall(r'role=~?"([^"]+)", state=~?"([^"]+)"', rule["expr"])
        for role in roles.split("|")
        for state in ([states] if re.escape(states) == states else [s for s in STATES[role] if re.fullmatch(states, s)])
    ]
    assert len(asked) >= 12
    assert all(state in STATES[role] for role, state in asked)
    windows = {window for rule in rules() if "record" in rule for window in re.findall(r"\[(\d+)m\]", rule["expr"])}
    assert windows == {str(scaling.WINDOW_S // 60)}
    for rule in rules():
        assert rule.get("record", "").endswith("30m") or rule["annotations"].keys() == {"summary", "description"}
