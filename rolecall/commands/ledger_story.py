"""The history of one group or trajectory, for people: what happened, when, to whom, and why."""

from collections.abc import Iterable, Sequence
from datetime import datetime

import numpy as np

from rolecall.errors import RowMissingError
from rolecall.store.history import Event
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import FinishReason


def own_events(events: Iterable[Event], gid: int) -> list[Event]:
    """The events of group `gid`, and the new lineages that came after it was admitted."""
    found: list[Event] = []
    for event in events:
        if event.gid == gid or (found and event.event == "lineage"):
            found.append(event)
    return found


def story(id: str, events: Sequence[Event], rows: Rows) -> str:
    """Tells what happened to `id`, a gid or `<gid>/<i>`, whose own events are `events`; of a trajectory also what its
    row says.
    """
    first, state = events[0], _state(events)
    lines = [f"group {first.gid}: {state}; prompt {first.fields.get('prompt') or '(without uid)'}", ""]
    for event in events:
        clock = datetime.fromtimestamp(event.time_s).isoformat(" ", "milliseconds")
        lines.append(f"  {clock}  {event.time_s - first.time_s:+10.3f} s  {event.event:<9}  {_said(event)}".rstrip())
    if "/" in id:
        lines += ["", f"trajectory {id}: {_row(id, events, rows)}"]
    return "\n".join(lines) + "\n"


def _state(events: Sequence[Event]) -> str:
    state = ""
    for event in events:
        if event.event in ("admitted", "committed", "sealed", "trained", "dropped"):
            state = event.event
        elif event.event == "lineage":
            state = _after_lineage(state, events, event)
    return state


def _after_lineage(state: str, events: Sequence[Event], lineage: Event) -> str:
    """A batch below the lineage's step stays trained. Which drops stay is the audit's to say: here a drop stays."""
    if state == "trained":
        steps = [int(event.fields["step"]) for event in events if event.event == "trained"]
        return state if steps[-1] < int(lineage.fields["step"]) else "undone"
    return state if state == "dropped" else "undone"


def _said(event: Event) -> str:
    fields = event.fields
    if event.event == "admitted":
        return f"at step {fields['step']}"
    if event.event == "claimed":
        return f"by {fields['token'].rpartition('-')[0]}, token {fields['token']}"
    if event.event in ("released", "abandoned", "reaped", "expelled"):
        counts = "does not count" if fields["excused"] == "1" else "counts"
        held = "; held back to be dropped" if fields["held_back"] == "1" else ""
        return f"from {fields['token']}, the delivery {counts}{held}" + (
            f": {fields['error']}" if fields["error"] else ""
        )
    if event.event == "committed":
        return f"by {fields['token']}, tokens of version {fields['versions'].replace(' ', ', ')}"
    if event.event == "sealed":
        return f"into batch {fields['step']}"
    if event.event == "trained":
        return f"as step {fields['step']}, on from version {fields['version']}"
    if event.event == "dropped":
        return f"as {fields['reason']}" + "".join(
            f"; {text}" for text in (fields["error"], fields["last_error"]) if text
        )
    if event.event == "lineage":
        return f"{fields['lineage']}: the run went back to the checkpoint of step {fields['step']}"
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _row(id: str, events: Sequence[Event], rows: Rows) -> str:
    tokens = [event.fields["token"] for event in events if event.event == "committed"]
    if not tokens:
        return "never committed"
    ref = rows.ref(id, tokens[-1], 0)
    try:
        meta = rows.read_meta([ref])[0]
    except RowMissingError:
        return "its row is deleted (the group was dropped, or a checkpoint covers it)"
    row = rows.read([ref], [], ["reward", "token_rewards"])[0]
    reward = row.get("reward", np.zeros(0))
    sampled = sum(span.end - span.start for span in meta.spans)
    spans = ", ".join(
        f"{span.start}-{span.end} by {span.worker} at version {span.policy_version}" for span in meta.spans
    )
    score = f"reward {reward[0] + row.get('token_rewards', np.zeros(0)).sum():g}" if reward.size else "not scored"
    reason = FinishReason.Name(meta.finish_reason).removeprefix("FINISH_REASON_").lower()
    greedy = "; sampled greedily, as a baseline that nothing is trained on" if meta.sampling.temperature == 0 else ""
    return f"{meta.num_prompt_tokens} + {sampled} tokens, {reason}, {score}; tokens {spans}{greedy}"
