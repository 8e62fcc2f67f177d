"""Trackers: a real HTTP server that is away, slow or refuses neither holds a run up nor ends it; real MLflow and W&B
take every name and table."""

import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.custom_tracker.webhook import Webhook
from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, RunSettings, SftSettings
from rolecall.trackers import MAX_SHOWN, End, TrackedRun, Trackers, background_tracker, require
from rolecall.trackers.background_tracker import BackgroundTracker
from rolecall.trackers.mlflow import MAX_NAME_CHARS, metric_name
from rolecall.trackers.tracker import shown_configuration, tables_of
from tests.conftest import MakeSettings

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
"""Bound on waits for events, generous: the machine may be busy."""
PAUSE_S = 0.01


class Receiver(ThreadingHTTPServer):
    """Takes JSON; answers 500 to every body that `refuses` is true of, and holds each request until `gate` is open."""

    daemon_threads = True

    def __init__(self, *, is_away: bool = False) -> None:
        """`is_away`: it has its port and refuses all who come, until `server_activate`."""
        super().__init__(("127.0.0.1", 0), _Receive, bind_and_activate=not is_away)
        if is_away:
            self.server_bind()
        self.bodies: list[dict[str, Any]] = []
        self.refuses: Callable[[Mapping[str, Any]], bool] = lambda body: False
        self.num_refused = 0
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(arrived, timeout=WAIT_S), (self.bodies, self.num_refused)

    def steps(self) -> set[int]:
        return {body["step"] for body in self.bodies}


class _Receive(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.gate.wait(timeout=WAIT_S)
        with self.server.changed:
            refused = self.server.refuses(body)
            if refused:
                self.server.num_refused += 1
            else:
                self.server.bodies.append(body)
            self.server.changed.notify_all()
        self.send_response(500 if refused else 200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun("0123456789abcdef", "test", folder, {})


def in_background(url: str, folder: Path, flush_s: float = background_tracker.FLUSH_S) -> BackgroundTracker:
    return BackgroundTracker(
        "webhook", lambda: Webhook(run_in(folder), url, WAIT_S), first_pause_s=PAUSE_S, flush_s=flush_s
    )


def test_what_a_server_missed_while_it_was_away_arrives_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Receiver(is_away=True)
    tracker = in_background(server.url, tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            tracker.log(step, {"loss": 0.5})
        deadline = time.monotonic() + WAIT_S
        while tracker.num_failures < 7 and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        server.server_activate()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        server.wait_for(lambda: server.steps() == set(range(20)))
        tracker.flush()
    server.shutdown()
    server.server_close()
    assert tracker.num_lost == 0
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].split(" after")[0] for line in told] == [
        "tracker webhook failed",
        "tracker webhook works again",
    ], told
    assert "the run goes on" in told[0]


def test_a_note_that_is_refused_is_given_up_and_the_others_arrive(receiver: Receiver, tmp_path: Path) -> None:
    receiver.refuses = lambda body: body["step"] == 3
    tracker = in_background(receiver.url, tmp_path)
    for step in range(6):
        tracker.log(step, {"loss": 0.5})
    receiver.wait_for(lambda: receiver.num_refused >= background_tracker.MAX_ATTEMPTS)
    tracker.log(6, {"loss": 0.5})
    receiver.wait_for(lambda: receiver.steps() == {0, 1, 2, 4, 5, 6})
    deadline = time.monotonic() + WAIT_S
    while tracker.num_lost < 1 and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    assert tracker.num_lost == 1  # while the run goes on, not by its end
    tracker.flush()
    assert receiver.num_refused >= background_tracker.MAX_ATTEMPTS


def test_a_server_that_never_answers_holds_nobody_up(receiver: Receiver, tmp_path: Path) -> None:
    receiver.gate.clear()
    tracker = in_background(receiver.url, tmp_path)
    started = time.monotonic()
    for step in range(1000):
        tracker.log(step, {f"metric/{i}": 1.0 for i in range(100)})
    assert time.monotonic() - started < WAIT_S / 2  # a thousand waits for one answer would be hours
    assert not receiver.bodies


class Held(Webhook):
    """Keeps samples once `gate` is open."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run, "", WAIT_S)
        self.entered, self.gate = threading.Event(), threading.Event()
        self.kept: list[int] = []

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.entered.set()
        assert self.gate.wait(timeout=WAIT_S)
        self.kept.append(step)


def test_the_oldest_notes_are_lost_and_counted_when_the_queue_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(run_in(tmp_path))
    tracker = BackgroundTracker("held", lambda: held)
    text = "x" * (background_tracker.MAX_QUEUED_CHARS // 4)
    tracker.keep_samples(0, [{"response": text}])
    assert held.entered.wait(timeout=WAIT_S)
    for step in range(1, 8):
        tracker.keep_samples(step, [{"response": text}])
    assert tracker.num_lost == 3
    held.gate.set()
    with caplog.at_level(logging.WARNING):
        tracker.flush()
    assert held.kept == [0, 4, 5, 6, 7]
    assert "3 notes were not written" in caplog.text


def test_the_end_of_a_run_waits_for_what_is_queued_but_not_for_ever(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = in_background(receiver.url, tmp_path)
    for step in range(50):
        tracker.log(step, {"loss": 0.5})
    tracker.flush()
    assert receiver.steps() == set(range(50))
    receiver.gate.clear()
    hung = in_background(receiver.url, tmp_path, flush_s=0.2)
    hung.log(50, {"loss": 0.5})
    with caplog.at_level(logging.WARNING):
        hung.flush()
    assert "did not close within" in caplog.text


def test_a_tracker_that_cannot_be_opened_is_opened_again(receiver: Receiver, tmp_path: Path) -> None:
    attempts: list[float] = []

    def open_tracker() -> Webhook:
        attempts.append(time.monotonic())
        if len(attempts) < 4:
            raise ConnectionError("nobody there")
        return Webhook(run_in(tmp_path), receiver.url, WAIT_S)

    tracker = BackgroundTracker("late", open_tracker, first_pause_s=PAUSE_S)
    tracker.log(0, {"loss": 0.5})
    receiver.wait_for(lambda: receiver.steps() == {0})
    tracker.flush()
    assert len(attempts) == 4
    assert tracker.num_lost == 0


# --- a run's trackers -----------------------------------------------------------------------------


def custom(url: str) -> dict[str, Any]:
    return {
        "tensorboard": False,
        "custom": {
            "function": f"{ROOT}/examples/custom_tracker/webhook:webhook",
            "options": {"url": url, "timeout_s": WAIT_S},
        },
    }


def test_a_tracker_of_the_users_own_gets_every_step_under_one_id_over_restarts(
    receiver: Receiver, make_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    settings = make_settings(trackers=custom(receiver.url))
    for step in range(3):  # a controller each
        trackers = Trackers(settings)
        trackers.log(step, {"eval/x/mean@1": 0.5})
        trackers.keep_samples(step, [{"set": "train", "response": "yes"}])
        trackers.flush(End.DONE)
    assert receiver.steps() == {0, 1, 2}
    assert len({body["id"] for body in receiver.bodies}) == 1
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]


def test_numbers_that_are_not_finite_are_null_in_the_files(make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trackers = Trackers(make_settings(trackers={"tensorboard": False}))
    trackers.log(1, {"actor/loss": float("nan"), "actor/sampler_ratio_max": float("inf"), "reward/mean": 0.5})
    trackers.keep_samples(1, [{"set": "train", "components": {"mine": float("-inf")}}])
    trackers.flush(End.DONE)
    told = [(tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
    assert not any(word in text for text in told for word in ("NaN", "Infinity"))
    row, sample = map(json.loads, told)
    assert (row["actor/loss"], row["actor/sampler_ratio_max"], row["reward/mean"]) == (None, None, 0.5)
    assert sample["components"] == {"mine": None}


def test_samples_beyond_what_people_read_are_in_the_file_alone(make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "counting.py").write_text(
        "import pathlib\n"
        "class Counting:\n"
        "    def __init__(self, run, path):\n"
        "        self.path = pathlib.Path(path)\n"
        "    def log(self, step, values): pass\n"
        "    def close(self): pass\n"
        "    def keep_samples(self, step, samples):\n"
        "        self.path.write_text(f'{step} {[each[\"set\"] for each in samples]}\\n')\n"
    )
    told = tmp_path / "told"
    function = {"function": f"{tmp_path}/counting:Counting", "options": {"path": str(told)}}
    trackers = Trackers(make_settings(trackers={"tensorboard": False, "custom": function}))
    trackers.keep_samples(1, ({"set": "train" if i < 200 else "held", "i": i} for i in range(210)))
    trackers.flush(End.DONE)
    assert told.read_text() == f"1 {['train'] * MAX_SHOWN + ['held'] * 10}\n"
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["i"] for line in lines] == list(range(210))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"function": "webhook:nothing"}, "has no function 'nothing'"),
        ({"function": "no_such_module:webhook"}, "there is no module 'no_such_module'"),
        ({"options": {"urll": "x"}}, "cannot be called with the run and the options"),
    ],
)
def test_a_tracker_that_is_not_there_or_takes_other_options_is_said_before_the_run(
    change: dict[str, Any], said: str, make_settings: MakeSettings
) -> None:
    section = custom("http://127.0.0.1:9/")
    settings = make_settings(trackers=section | {"custom": section["custom"] | change})
    with pytest.raises(ConfigError, match=r"trackers\.custom\.function") as caught:
        list(require(settings.trackers))
    assert said in caught.value.message


def test_nothing_that_is_sent_to_a_tracker_is_a_credential(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(
        store={"url": "redis://user:store-secret@redis.example:6379/0"},
        run={
            "name": "test",
            "dir": str(tmp_path / "run"),
            "num_steps": 1,
        },
        telemetry={"otlp_endpoint": "http://key:endpoint-secret@collector.example:4317"},
        trackers={
            "custom": {"function": "a:b", "options": {"key": "option-secret"}},
        },
    )
    shown = json.dumps(shown_configuration(settings))
    assert "secret" not in shown
    assert "http://collector.example:4317" in shown


def test_trackers_are_shown_all_that_the_critic_trains_with(make_settings: MakeSettings) -> None:
    settings = make_settings(
        algorithm={"groups_per_batch": 2, "advantage": {"kind": "gae"}},
        actor={"optimizer": {"schedule": "cosine", "max_grad_norm": 0.5}},
        critic={"optimizer": {"weight_decay": 0.1}},
    )
    optimizer = shown_configuration(settings)["critic"]["optimizer"]
    assert optimizer.keys() == OptimizerSection.model_fields.keys()
    told = optimizer["learning_rate"], optimizer["weight_decay"], optimizer["schedule"], optimizer["max_grad_norm"]
    assert told == (1e-5, 0.1, "cosine", 0.5)


def test_what_is_told_of_a_tracker_names_no_password(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Webhook:
        raise ConnectionError("https://user:hidden@tracker.example/api?a=1&api_key=hidden&b=2 refused")

    with caplog.at_level(logging.WARNING):
        BackgroundTracker("webhook", refuse).flush()
    assert "https://tracker.example/api?a=1&&b=2 refused" in caplog.text
    assert "hidden" not in caplog.text


def test_samples_become_a_table_of_each_set_with_cells_that_every_tracker_takes() -> None:
    samples = [
        {"step": 1, "set": "train", "prompt": [["user", "2+2?"], ["user", "well?"]], "reward": 1.0},
        {"step": 1, "set": "held", "prompt": [["user", "hm"]], "reward": None, "other": {"a": 1}},
    ]
    assert tables_of(samples) == {
        "train": (["step", "set", "prompt", "reward"], [[1, "train", "user: 2+2?\nuser: well?", 1.0]]),
        "held": (["step", "set", "prompt", "reward", "other"], [[1, "held", "user: hm", None, '{"a": 1}']]),
    }
    assert tables_of([{"text": "a"}, {"text": "b"}]) == {"samples": (["text"], [["a"], ["b"]])}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval/x/mean@1", "eval/x/mean_1"),
        ("eval/x/source/openai/gsm8k/accuracy", "eval/x/source/openai/gsm8k/accuracy"),
        ("ok/name-1.x y:z", "ok/name-1.x y:z"),
    ],
)
def test_a_name_is_written_as_mlflow_takes_it(name: str, taken: str) -> None:
    assert metric_name(name) == taken


def test_names_that_mlflow_refuses_stay_apart() -> None:
    sources = ("größe", "grüße", "gr__e", "数学", "物理", "a+b", "a=b", "a@b", "a_b", "a//b", "a/b", "..", ".", "")
    names = [f"eval/x/source/{source}/accuracy" for source in (*sources, "x" * 300, "x" * 301)]
    taken = [metric_name(name) for name in names]
    assert len(set(taken)) == len(names)
    for name in taken:
        assert len(name) <= MAX_NAME_CHARS
        assert re.fullmatch(r"[A-Za-z0-9_\-. :/]+", name)
        assert not {"", ".", ".."} & set(name.split("/"))
    group = metric_name("eval/x/source/größe/accuracy").rpartition("/")[0]
    assert metric_name("eval/x/source/größe/reward") == f"{group}/reward"


# --- the real libraries ---------------------------------------------------------------------------

STEPS = """
import sys
from pathlib import Path
from rolecall.settings import load_settings
from rolecall.trackers import End, Trackers

trackers = Trackers(load_settings(Path(sys.argv[1])))
step = int(sys.argv[2])
by_source = {f"eval/held/source/{source}/accuracy": 0.5 for source in ("größe", "grüße", "a//b", "..")}
trackers.log(step, {"eval/held/mean@1": 0.25, "reward/a/b": 1.0, "loss": float("nan"), **by_source})
sample = {"step": step, "set": "held", "prompt": [["user", "2+2?"]], "response": "4", "reward": 1.0}
trackers.keep_samples(step, [sample])
trackers.flush(End.DONE)
"""


ENDS = """
import sys
from pathlib import Path
from rolecall.settings import load_settings
from rolecall.trackers import End, Trackers

for end in End:
    settings = load_settings(Path(sys.argv[1]), [f"run.dir={Path(sys.argv[1]).parent / 'run' / end.name}"])
    settings.run.dir.mkdir()
    trackers = Trackers(settings)
    trackers.log(0, {"loss": 0.5})
    trackers.flush(end)
"""


def controllers(
    settings: RunSettings, folder: Path, environment: dict[str, str], code: str = STEPS, steps: Sequence[int] = (0, 1)
) -> list[str]:
    """What processes of `code` say on stderr, such as two that log a step each, a controller and the one after it."""
    settings.run.dir.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(settings.model_dump(mode="json", exclude={"store": {"url"}})))
    said = []
    for step in steps:
        command = [sys.executable, "-c", code, str(config), str(step)]
        done = subprocess.run(
            command,
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stderr)
    return said


def test_real_mlflow_takes_every_metric_and_table_as_one_run(make_settings: MakeSettings, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    said = controllers(
        make_settings(trackers={"tensorboard": False, "mlflow_uri": uri}), tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true"}
    )
    assert not any("tracker mlflow" in each for each in said), said
    (run,) = [path.parent for path in (tmp_path / "mlruns").glob("*/*/meta.yaml")]
    points = [line.split() for line in (run / "metrics" / "eval" / "held" / "mean_1").read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step in points] == [(0.25, 0), (0.25, 1)]
    assert (run / "metrics" / "reward" / "a" / "b").exists()
    assert len(list((run / "metrics" / "eval" / "held" / "source").glob("**/accuracy"))) == 4
    table = json.loads((run / "artifacts" / "samples" / "held" / "step-00000001.json").read_text())
    assert table == {
        "columns": ["step", "set", "prompt", "response", "reward"],
        "data": [[1, "held", "user: 2+2?", "4", 1.0]],
    }
    assert json.loads((run / "artifacts" / "configuration.json").read_text())["run"]["name"] == "test"
    assert "status: 3" in (run / "meta.yaml").read_text()  # FINISHED


def test_real_mlflow_shows_how_a_run_ended(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(trackers={"tensorboard": False, "mlflow_uri": (tmp_path / "mlruns").as_uri()})
    (said,) = controllers(settings, tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true"}, ENDS, steps=[0])
    assert "tracker mlflow" not in said
    ids = {end: (tmp_path / "run" / end.name / "tracker_run_id").read_text().strip() for end in End}
    statuses = {
        (path.parent / "tags" / "rolecall.run_id").read_text(): yaml.safe_load(path.read_text())["status"]
        for path in (tmp_path / "mlruns").glob("*/*/meta.yaml")
    }
    running, finished, failed, killed = 1, 3, 4, 5
    assert {end: statuses[id] for end, id in ids.items()} == {
        End.DONE: finished,
        End.FAILED: failed,
        End.STOPPED: killed,
        End.GOES_ON: running,
    }


def test_mlflow_that_refuses_to_open_is_told_and_the_run_goes_on(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Its file store needs leave since 3.17, and says so."""
    uri = (tmp_path / "mlruns").as_uri()
    said = controllers(
        make_settings(trackers={"tensorboard": False, "mlflow_uri": uri}),
        tmp_path,
        {"MLFLOW_ALLOW_FILE_STORE": "false"},
    )
    assert all("tracker mlflow failed" in each and "notes were not written" in each for each in said), said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_real_wandb_offline_takes_every_metric_and_table_as_one_run(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(trackers={"tensorboard": False, "wandb_project": "p"})
    said = controllers(settings, tmp_path, {"WANDB_MODE": "offline", "HOME": str(tmp_path)})
    assert not any("tracker wandb" in each for each in said), said
    id = (tmp_path / "run" / "tracker_run_id").read_text().strip()
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert [folder.name.rpartition("-")[2] for folder in folders] == [id, id]
    for folder in folders:
        records = (folder / f"run-{id}.wandb").read_bytes()
        assert b"eval/held/mean@1" in records
        assert b"checkpoint_every_steps" in records  # the configuration
        (table,) = folder.glob("files/media/table/samples/*.table.json")
        assert json.loads(table.read_text())["columns"] == ["step", "set", "prompt", "response", "reward"]


def test_real_wandb_offline_is_told_how_a_run_ended(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(trackers={"tensorboard": False, "wandb_project": "p"})
    (said,) = controllers(settings, tmp_path, {"WANDB_MODE": "offline", "HOME": str(tmp_path)}, ENDS, steps=[0])
    assert "tracker wandb" not in said
    told = {}
    for end in End:
        (file,) = (tmp_path / "run" / end.name / "wandb").glob("offline-run-*/*.wandb")
        records = list(wandb_records(file))
        (code,) = (record.exit.exit_code for record in records if record.HasField("exit"))
        told[end] = (code, any(record.HasField("preempting") for record in records))
    assert told == {
        End.DONE: (0, False),
        End.FAILED: (1, False),
        End.STOPPED: (1, True),
        End.GOES_ON: (1, True),
    }


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # of its block, too little for the head of a record
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def test_an_sft_is_tracked_too(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    tree = {
        "run": {"name": "warm", "dir": str(tmp_path / "run"), "num_steps": 1},
        "model": {"path": str(tmp_path)},
        "data": {"train": str(tmp_path / "train.jsonl"), "batch_size": 1, "max_tokens": 8},
        "trackers": custom(receiver.url),
    }
    trackers = Trackers(SftSettings.model_validate(tree))
    trackers.log(1, {"sft/loss": 2.0})
    trackers.flush(End.DONE)
    assert receiver.steps() == {1}
