"""What the terminal shows of a run."""

import io
import json
import os

from rich.console import Console

from rolecall.launcher.progress import PlainView, Steady, ledger_line, render
from rolecall.launcher.run_record import as_json_line
from rolecall.v1 import controller_pb2, trajectory_pb2


def status(step: int, **metrics: float) -> controller_pb2.RunStatus:
    names = {name.replace("__", "/"): value for name, value in metrics.items()}
    return controller_pb2.RunStatus(
        run="demo",
        state=controller_pb2.RUN_STATE_RUNNING,
        step=step,
        total_steps=20,
        ledger=controller_pb2.LedgerCounts(
            admitted=10, trained=6, dropped={"without_signal": 1}, live=3, queued=1, generating=1, committed=1
        ),
        metrics=[trajectory_pb2.Metric(name=name, value=value) for name, value in names.items()],
        workers=[controller_pb2.WorkerStatus(worker="rollout-0", phase="generating", policy_version=4)],
    )


def test_a_run_goes_on_when_nobody_reads_what_it_says_any_more() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        view = Steady(stream)
        view.note("a line")
        view.show(status(1))
        view.close()  # and the stream can be closed, as Python does at its end


def test_a_run_goes_on_where_its_stream_lacks_a_character() -> None:
    written = io.BytesIO()
    view = Steady(io.TextIOWrapper(written, encoding="latin-1"))
    view.note("the answer is 答")
    view.note("the next")
    view.close()
    assert written.getvalue() == b"the next\n"


def test_plain_lines_come_once_per_step() -> None:
    out = io.StringIO()
    view = PlainView(out)
    for shown in (
        status(1, reward__mean=0.25),
        status(1, reward__mean=0.25),
        status(2, reward__mean=0.5, staleness__max=1.0),
    ):
        view.show(shown)
    assert out.getvalue().splitlines() == [
        "running  step 1/20  reward 0.250",
        "running  step 2/20  reward 0.500  staleness 1",
    ]


def test_utilisation_is_shown_where_it_is_known() -> None:
    out = io.StringIO()
    PlainView(out).show(status(1, actor__mfu=0.4123))
    assert out.getvalue() == "running  step 1/20  MFU 41%\n"


def test_an_evaluation_between_steps_has_a_line_of_its_own() -> None:
    out = io.StringIO()
    view = PlainView(out)
    view.show(status(1))
    view.show(status(1, eval__heldout__accuracy=0.9))
    assert out.getvalue().splitlines()[-1].endswith("eval heldout 0.900")


def test_the_sources_of_a_held_out_set_have_a_line_in_the_table_and_none_among_the_steps() -> None:
    values = {"accuracy": 0.5, "source/openai/gsm8k/accuracy": 0.25, "source/openai/gsm8k/prompts": 660.0}
    values |= {"source/math/accuracy": 1.0, "source/math/prompts": 220.0, "source/none_scored/prompts": 0.0}
    shown = status(3, **{f"eval/held/{name}": value for name, value in values.items()})
    out, table = io.StringIO(), io.StringIO()
    PlainView(out).show(shown)
    Console(file=table, width=120).print(render(shown))
    assert out.getvalue() == "running  step 3/20  eval held 0.500\n"
    assert "eval held 0.500\neval held by source: math 1.000 (220), openai/gsm8k 0.250 (660)\n" in table.getvalue()


def test_a_held_out_set_whose_name_looks_like_a_source_is_shown_as_any_other() -> None:
    shown = status(3, **{"eval/bench/source/x/accuracy": 0.5})
    out, table = io.StringIO(), io.StringIO()
    PlainView(out).show(shown)
    Console(file=table, width=120).print(render(shown))
    assert out.getvalue() == "running  step 3/20  eval bench source x 0.500\n"
    assert "by source" not in table.getvalue()


def test_a_start_says_what_it_waits_for() -> None:
    out = io.StringIO()
    PlainView(out).show(
        controller_pb2.RunStatus(state=controller_pb2.RUN_STATE_STARTING, total_steps=5, waiting_for="actor")
    )
    assert out.getvalue() == "starting step 0/5  waiting for actor\n"


def test_a_recovery_has_one_line_with_what_failed() -> None:
    out = io.StringIO()
    view = PlainView(out)
    recovering = status(3)
    recovering.num_recoveries, recovering.last_failure = 1, "actor: connection refused"
    for shown in (status(3), recovering, recovering):
        view.show(shown)
    assert out.getvalue().splitlines() == ["running  step 3/20", "recovery 1: actor: connection refused"]


def test_a_wait_is_worth_a_line_only_when_it_is_long_for_this_run() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, lambda: now[0])
    waiting = status(3)
    waiting.waiting_for = "training of step 3"
    for now[0] in (0.0, 5.0, 14.9):
        view.show(waiting)
    assert len(out.getvalue().splitlines()) == 1
    for now[0] in (16.0, 30.0):
        view.show(waiting)
    assert out.getvalue().splitlines()[1:] == ["waiting  step 3/20  for training of step 3, for 16 s now"]
    next_one = status(4)
    next_one.waiting_for = "training of step 4"
    for now[0] in (30.0, 59.0):
        view.show(next_one)
    assert out.getvalue().splitlines()[2:] == ["running  step 4/20"]
    now[0] = 91.0
    view.show(next_one)
    assert out.getvalue().splitlines()[3:] == ["waiting  step 4/20  for training of step 4, for 61 s now"]


def test_a_long_wait_tells_of_groups_that_are_dropped_meanwhile_twice_as_many_each_time() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, lambda: now[0])
    for now[0], num_dropped in ((0.0, 0), (16.0, 3), (17.0, 5), (18.0, 6), (19.0, 11), (20.0, 12)):
        waiting = status(3)
        waiting.waiting_for = "groups of step 3"
        waiting.ledger.dropped["too_long"] = num_dropped
        view.show(waiting)
    assert out.getvalue().splitlines()[1:] == [
        f"waiting  step 3/20  for groups of step 3, for {seconds} s now; dropped {number} (too_long {number})"
        for seconds, number in ((16, 3), (18, 6), (20, 12))
    ]


def test_neither_a_pause_nor_an_old_wait_hides_one_that_is_long() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, lambda: now[0])

    def wait(step: int, seconds: float, state: controller_pb2.RunState.ValueType) -> str:
        waiting = status(step)
        waiting.waiting_for, waiting.state = "training", state
        before = len(out.getvalue())
        view.show(waiting)
        now[0] += seconds
        view.show(waiting)
        return out.getvalue()[before:]

    wait(3, 1e6, controller_pb2.RUN_STATE_PAUSED)
    assert "waiting  step 3/20" in wait(3, 40.0, controller_pb2.RUN_STATE_RUNNING)
    assert "waiting  step 4/20" in wait(4, 1e5, controller_pb2.RUN_STATE_RUNNING)
    for step in range(5, 1010):
        assert "waiting" not in wait(step, 10.0, controller_pb2.RUN_STATE_RUNNING)
    assert "waiting  step 1010/20  for training, for 40 s now" in wait(1010, 40.0, controller_pb2.RUN_STATE_RUNNING)


def test_a_lost_worker_says_why() -> None:
    out = io.StringIO()
    lost = status(3)
    lost.workers[0].lost = "no progress for 15 s"
    lost.num_recoveries, lost.last_failure = 2, "the store was away"
    Console(file=out, width=120).print(render(lost))
    assert "lost: no progress for 15 s" in out.getvalue()
    assert "recovery 2: the store was away" in out.getvalue()


def test_a_run_whose_counts_are_not_known_is_shown_without_them() -> None:
    known, console = status(3), Console(width=120, record=True, file=io.StringIO())
    known.ClearField("ledger")
    console.print(render(known))
    shown = console.export_text()
    assert "step 3/20" in shown
    assert "groups" not in shown
    assert json.loads(as_json_line(known))["ledger"] is None
    assert json.loads(as_json_line(status(3)))["ledger"]["live"] == 3


def test_numbers_that_are_not_finite_are_null_for_programs() -> None:
    told = as_json_line(status(3, actor__loss=float("nan"), actor__sampler_ratio_max=float("inf"), reward__mean=0.5))
    assert "NaN" not in told
    assert "Infinity" not in told
    assert json.loads(told)["metrics"] == {"actor/loss": None, "actor/sampler_ratio_max": None, "reward/mean": 0.5}


def test_the_ledger_balances_in_words() -> None:
    line = ledger_line(status(1).ledger)
    assert (
        line == "groups: admitted 10 = trained 6 + dropped 1 (without_signal 1) + live 3 (queued 1, generating 1, "
        "committed 1)"
    )


def test_the_table_names_the_fleet_and_its_versions() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(render(status(3, reward__accuracy=0.75), elapsed_s=61))
    text = out.getvalue()
    assert "step 3/20" in text
    assert "1:01" in text
    assert "accuracy 0.750" in text
    assert "rollout-0" in text
    assert "v4" in text


def test_trouble_that_lasts_has_a_line_with_its_cause_and_one_when_it_is_over() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, lambda: now[0])
    fine, troubled = status(3), status(3)
    troubled.trouble = "scorer 'reward' at 127.0.0.1:9 gives no scores: UNAVAILABLE: nobody listens"
    for now[0], shown in ((0.0, troubled), (4.0, fine), (5.0, troubled), (9.0, troubled)):
        view.show(shown)
    assert len(out.getvalue().splitlines()) == 1
    for now[0], shown in ((10.5, troubled), (12.0, troubled), (13.0, fine), (14.0, fine)):
        view.show(shown)
    assert out.getvalue().splitlines()[1:] == [f"trouble  step 3/20  {troubled.trouble}", "trouble  step 3/20  is over"]
    console = Console(file=io.StringIO(), width=200)
    console.print(render(troubled))
    assert troubled.trouble in console.file.getvalue()  # type: ignore[attr-defined]


def test_trouble_that_comes_while_another_lasts_has_a_line_too() -> None:
    out, now = io.StringIO(), [0.0]
    view = PlainView(out, lambda: now[0])
    full, both = status(3), status(3)
    full.trouble = "no checkpoint since step 2: no space to write /runs/r"
    both.trouble = f"scorer 'reward' gives no scores; {full.trouble}"
    for now[0], shown in ((0.0, full), (6.0, full), (20.0, both), (70.0, both), (80.0, both), (100.0, full)):
        view.show(shown)
    assert out.getvalue().splitlines()[1:] == [f"trouble  step 3/20  {each.trouble}" for each in (full, both)]


def dropping(step: int, last: str = "", **dropped: int) -> controller_pb2.RunStatus:
    shown = controller_pb2.RunStatus(state=controller_pb2.RUN_STATE_RUNNING, step=step, total_steps=20, last_drop=last)
    shown.ledger.SetInParent()
    for reason, count in dropped.items():
        shown.ledger.dropped[reason] = count
    return shown


def test_groups_that_fail_are_told_as_it_happens_with_the_reason_and_not_once_each() -> None:
    out, now = io.StringIO(), 0.0
    view = PlainView(out, lambda: now)
    view.show(controller_pb2.RunStatus(state=controller_pb2.RUN_STATE_RUNNING, step=3, total_steps=20))
    view.show(dropping(3, scorer_error=7))  # of a controller before: no news
    view.show(dropping(3, "group 8: scorer_error: no score today", scorer_error=8))
    now = 5.0
    view.show(dropping(3, "group 9: scorer_error: no score today", scorer_error=9))
    now = 10.0
    view.show(dropping(3, "group 21: over_delivered: killed it", scorer_error=19, over_delivered=1))
    assert out.getvalue().splitlines() == [
        "running  step 3/20",
        "dropped  step 3/20  1 (scorer_error 1); the last: group 8: scorer_error: no score today",
        "dropped  step 3/20  12 (over_delivered 1, scorer_error 11); the last: group 21: over_delivered: killed it",
    ]


def test_a_steps_line_counts_what_was_dropped_since_the_last_by_reason() -> None:
    out = io.StringIO()
    view = PlainView(out)
    for shown in (
        dropping(1, without_signal=4),
        dropping(2, without_signal=9, truncated=1),
        dropping(3, without_signal=9, truncated=1),
    ):
        view.show(shown)
    assert out.getvalue().splitlines() == [
        "running  step 1/20",
        "running  step 2/20  dropped 6 (truncated 1, without_signal 5)",
        "running  step 3/20",
    ]


def test_the_live_table_names_the_last_group_that_failed() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(dropping(3, "group 8: scorer_error: no score today", scorer_error=8)))
    assert "last dropped: group 8: scorer_error: no score today" in console.export_text()
