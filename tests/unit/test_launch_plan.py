"""Which processes the launcher starts, where they listen and what they find in their environment."""

import io
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.check import find_problems
from rolecall.commands.cli import main
from rolecall.errors import ConfigError, NotFoundError, RunExistsError
from rolecall.launcher.last_words import describe_failure, last_words
from rolecall.launcher.plan import _bind, metrics_binds, plan_workers, resolve, role_environment, write_config
from rolecall.launcher.processes import Worker
from rolecall.launcher.run_dir import prepare_run_dir
from rolecall.launcher.run_record import RunRecord
from rolecall.launcher.supervisor import train
from rolecall.launcher.used_store import require_used_store
from rolecall.settings import ActorSection, RunSettings, load_settings
from rolecall.shifts import Post, ShiftLocks
from rolecall.v1 import controller_pb2
from tests.conftest import MakeSettings
from tests.file_limits import few_files
from tests.twins.launched import write_light_config

PPO = {"algorithm": {"groups_per_batch": 2, "advantage": {"kind": "gae"}}}


def store_url_of(role: str) -> str:
    return f"unix:///{role}:secret@/store"


def test_every_local_role_gets_an_address_of_its_own(make_settings: MakeSettings) -> None:
    configured = make_settings(**PPO, critic={})
    resolved = resolve(configured)
    assert resolved.critic is not None
    addresses = [section.address for section in (resolved.controller, resolved.actor, resolved.critic, resolved.reward)]
    assert None not in addresses
    assert len(set(addresses)) == 4


def test_ranks_share_the_cores_of_the_machine_unless_told_otherwise() -> None:
    num_cores = len(os.sched_getaffinity(0))
    for num_ranks in (1, 2, num_cores, 2 * num_cores):
        assert int(role_environment(ActorSection(num_ranks=num_ranks))["OMP_NUM_THREADS"]) == max(
            1, num_cores // num_ranks
        )
    assert role_environment(ActorSection(num_ranks=2), num_threads=3)["OMP_NUM_THREADS"] == "3"


def test_roles_with_an_address_are_not_started(make_settings: MakeSettings) -> None:
    reward = {"address": "scorer:50051", "components": {}}
    configured = make_settings(reward=reward, actor={"address": "elsewhere:1"}, rollout={"num_replicas": 2})
    resolved = resolve(configured)
    assert [worker.name for worker in plan_workers(configured, resolved, store_url_of)] == [
        "controller",
        "rollout-0",
        "rollout-1",
    ]
    assert resolved.reward.address == "scorer:50051"


def test_launchers_that_start_together_choose_different_ports() -> None:
    """None of them has bound its ports when the next one looks for free ones."""
    choose = "from rolecall.launcher.plan import _free_ports; print(*_free_ports(5))"
    launchers = [subprocess.Popen([sys.executable, "-c", choose], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    chosen = [port for launcher in launchers for port in launcher.communicate(timeout=120)[0].split()]
    assert len(chosen) == len(set(chosen)) == 15


def test_a_role_takes_no_more_ports_than_it_looks_at() -> None:
    """Or launchers that start together would reach each other's places."""
    with socket.socket() as busy, socket.socket() as opened:
        busy.bind(("127.0.0.1", 0))
        ports = iter([busy.getsockname()[1], 0, 7])
        _bind(opened, ports)
        assert list(ports) == [7]


def test_local_roles_show_their_metrics_on_ports_in_a_row_and_a_role_alone_on_the_one_that_is_set(
    make_settings: MakeSettings,
) -> None:
    configured = make_settings(rollout={"num_replicas": 2}, telemetry={"metrics_bind": "127.0.0.1:9464"})
    workers = plan_workers(configured, resolve(configured), store_url_of)
    binds = {worker.name: worker.command[-1] for worker in workers}
    assert binds == metrics_binds(configured)
    assert list(binds) == ["controller", "actor", "reward", "rollout-0", "rollout-1"]
    assert list(binds.values()) == [f"127.0.0.1:{port}" for port in range(9464, 9469)]
    assert metrics_binds(make_settings()) == {}
    free = make_settings(telemetry={"metrics_bind": "127.0.0.1:0"})
    assert set(metrics_binds(free).values()) == {"127.0.0.1:0"}
    with pytest.raises(ConfigError, match=r"telemetry\.metrics_bind 127\.0\.0\.1:65534"):
        metrics_binds(make_settings(telemetry={"metrics_bind": "127.0.0.1:65534"}))
    with pytest.raises(ValidationError, match="is not host:port"):
        make_settings(telemetry={"metrics_bind": "unix:/tmp/metrics"})


def test_references_are_started_by_the_name_of_the_instance(make_settings: MakeSettings) -> None:
    algorithm = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    configured = make_settings(algorithm=algorithm, references={"ref": {}})
    workers = plan_workers(configured, resolve(configured), store_url_of)
    reference = next(worker for worker in workers if worker.role == "reference")
    assert reference.name == "ref"
    assert reference.command[-2:] == ("--name", "ref")


def test_a_trainer_of_several_ranks_goes_through_torchrun(make_settings: MakeSettings) -> None:
    configured = make_settings(actor={"num_ranks": 2})
    workers = plan_workers(configured, resolve(configured), store_url_of)
    actor = next(worker for worker in workers if worker.name == "actor")
    assert "rolecall.training.ranks.torchrun" in actor.command
    assert "--nproc-per-node=2" in actor.command


def test_roles_of_another_package_are_started_by_its_name(make_settings: MakeSettings) -> None:
    configured = make_settings()
    workers = plan_workers(configured, resolve(configured), store_url_of, "tests.light")
    assert [worker.command[3] for worker in workers] == [
        f"tests.light.{role}" for role in ("controller", "actor", "reward", "rollout")
    ]
    assert [worker.role for worker in workers] == ["controller", "actor", "reward", "rollout"]


def test_each_role_sees_its_own_gpus_and_no_other(make_settings: MakeSettings) -> None:
    configured = make_settings(actor={"devices": [2, 3], "num_ranks": 2}, rollout={"devices": [[0]]})
    workers = {worker.name: worker for worker in plan_workers(configured, resolve(configured), store_url_of)}
    assert workers["actor"].environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert workers["controller"].environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_store_s_url_travels_in_the_environment_only_and_each_role_gets_its_own(
    make_settings: MakeSettings,
) -> None:
    configured = make_settings(store={"url": "redis://user:secret@store:6379"})
    resolved = resolve(configured)
    workers = plan_workers(configured, resolved, store_url_of)
    assert all("secret" not in " ".join(worker.command) for worker in workers)
    urls = {worker.role: worker.environment.get("ROLECALL_STORE_URL") for worker in workers}
    assert urls == {**{role: store_url_of(role) for role in ("controller", "actor", "rollout")}, "reward": ""}
    resolved.run.dir.mkdir()
    assert "secret" not in write_config(resolved).read_text()


def test_a_run_does_not_go_on_in_the_directory_of_a_fine_tuning(make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(run={"name": "test", "dir": str(tmp_path), "num_steps": 1})
    (tmp_path / "config.yaml").write_text("run: {name: tuned}\n")
    (tmp_path / "identity.json").write_text("{}")
    with pytest.raises(NotFoundError, match="is of `rolecall sft`, and `rolecall train` cannot go on with it"):
        prepare_run_dir(settings, resume=True)
    assert (tmp_path / "config.yaml").read_text() == "run: {name: tuned}\n"


def test_a_run_does_not_go_on_beside_a_store_that_holds_nothing_of_it(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(run={"name": "test", "dir": str(tmp_path), "num_steps": 1})
    write_config(settings)
    (tmp_path / "store.json").write_text('{"store": "store:6379/0"}')
    with few_files():
        with pytest.raises(ConfigError, match=r"embedded holds nothing of it.*the URL of store:6379/0 again"):
            train(settings, resume=True)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard, "a launcher, and the store that it starts, may open what the machine lets them"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "store.json"], "nothing was started"
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "appendonlydir").mkdir()
    require_used_store(settings)  # one that moved with what it holds is the same


def test_the_written_configuration_reads_back_the_same(make_settings: MakeSettings) -> None:
    resolved = resolve(make_settings(**PPO, critic={"value_clip_eps": None}))
    resolved.run.dir.mkdir()
    assert load_settings(write_config(resolved)).model_dump() == resolved.model_dump()


def test_a_deadline_follows_what_is_changed_in_the_written_configuration(make_settings: MakeSettings) -> None:
    resolved = resolve(make_settings(rollout={"hang_s": 7.0}))
    resolved.run.dir.mkdir()
    longer = load_settings(write_config(resolved), ["sampling.max_tokens=8000"])
    assert longer.rollout.generation_timeout_s > resolved.rollout.generation_timeout_s
    assert longer.rollout.hang_s == 7


def test_scorers_are_found_beside_the_file_the_user_wrote(tmp_path: Path) -> None:
    resolved = resolve(load_settings(write_light_config(tmp_path)))
    assert resolved.reward.search_path == tmp_path
    resolved.run.dir.mkdir()
    assert load_settings(write_config(resolved)).reward.search_path == tmp_path


@pytest.mark.parametrize("bind", ["0.0.0.0:7000", "127.0.0.1:7000"])
def test_a_bind_decides_the_port_and_is_reached_on_this_machine(make_settings: MakeSettings, bind: str) -> None:
    resolved = resolve(make_settings(controller={"bind": bind}))
    assert resolved.controller.bind == bind
    assert resolved.controller.address == "127.0.0.1:7000"


def test_the_first_rank_that_failed_is_quoted_not_its_consequences() -> None:
    log = [
        "=== started actor",
        "Traceback (most recent call last):",
        "  x",
        "actor failed: out of memory",
        "actor failed: peer closed",
        "torchrun: so it did",
    ]
    assert last_words(log)[-1] == "actor failed: out of memory"


def test_a_crash_of_native_code_is_quoted_from_its_thread_on() -> None:
    stacks = [f'  File "thread.py", line {line} in run' for line in range(40)]
    log = ["loading", "Fatal Python error: Segmentation fault", "Thread 0x1 (most recent call first):", *stacks]
    assert list(last_words(log)) == log[1:21]


def test_only_the_last_start_is_quoted_from_a_log_of_several() -> None:
    log = [
        "=== started actor",
        "actor failed: long ago",
        "=== started actor",
        "Traceback (most recent call last):",
        "KeyError: 'now'",
    ]
    assert list(last_words(log)) == ["Traceback (most recent call last):", "KeyError: 'now'"]


def test_a_server_of_vllm_s_is_quoted_with_what_its_processes_said_first(tmp_path: Path) -> None:
    failed = "model-server failed: RuntimeError: Engine core initialization failed. See root cause above. Failed core"
    said = "(Worker pid=7) ERROR 11-29 14:15:02 [multiproc_executor.py:953]"
    worker = Worker("model_server", "grader", (), {}, tmp_path / "grader.log")
    worker.log.write_text(
        f"=== started grader\n{said} RuntimeError: of another start\n=== started grader\n"
        f"{said} Traceback (most recent call last):\n{said}   File model.py, line 1\n"
        f"{said} RuntimeError: start (0) + length (512) exceeds 256.\n"
        f"(EngineCore pid=6) ERROR 11-29 14:15:03 [core.py:1490] Exception: WorkerProc failed\n{failed}\n"
    )
    cause = "The root cause: RuntimeError: start (0) + length (512) exceeds 256. Failed core"
    told = describe_failure(worker, 75).splitlines()
    assert told[0].endswith(f"Engine core initialization failed. {cause})")
    assert told[-2].endswith(cause)
    worker.log.write_text(f"=== started grader\n{failed}\n")
    assert "See root cause above" in describe_failure(worker, 75)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("reward failed: no such module\n", "reward ended with exit code 1 (reward failed: no such module)"),
        ("Killed\n", "reward ended with exit code 1"),
    ],
)
def test_the_first_line_of_a_failure_says_all_that_one_line_can(tmp_path: Path, log: str, line: str) -> None:
    worker = Worker("reward", "reward", (), {}, tmp_path / "reward.log")
    worker.log.write_text(f"=== started reward\n{log}")
    described = describe_failure(worker, 1).splitlines()
    assert described == [line, f"    {log.strip()}", f"  log: {worker.log}"]
    assert RunRecord(controller_pb2.RunStatus(), 0.0, 1, described[0]).how == f"failed: {line}; see logs/"


@pytest.mark.parametrize("name", ["config.yaml", "mine.txt", "checkpoints"])
def test_a_directory_in_which_no_run_was_started_is_left_as_it_is_with_one_remedy(tmp_path: Path, name: str) -> None:
    settings = load_settings(write_light_config(tmp_path))
    settings.run.dir.mkdir()
    (settings.run.dir / name).write_text("mine")
    told = f"run.dir {settings.run.dir} holds {name}, and no run was started there; name another with --run.dir"
    for resume in (False, True):
        with pytest.raises(RunExistsError, match=re.escape(told)):
            prepare_run_dir(settings, resume=resume)
    assert [problem for problem in find_problems(settings, io.StringIO()) if told in problem]
    assert [(path.name, path.read_text()) for path in settings.run.dir.iterdir()] == [(name, "mine")]


def test_the_root_of_a_fresh_volume_is_taken(tmp_path: Path) -> None:
    settings = load_settings(write_light_config(tmp_path))
    (settings.run.dir / "lost+found").mkdir(parents=True)
    os.close(prepare_run_dir(settings, resume=False))
    assert (settings.run.dir / "lost+found").is_dir()


def test_roles_elsewhere_may_wait_for_their_shift_before_there_is_a_run(tmp_path: Path) -> None:
    settings = load_settings(write_light_config(tmp_path))
    post = Post(settings.run.dir, "trainers")
    for _ in range(2):  # the second finds what an attempt left in which nothing was trained
        os.close(prepare_run_dir(settings, resume=False))
        (settings.run.dir / "identity.json").touch()
    locks = ShiftLocks(settings.run.dir)
    assert locks.give_to("trainers")
    assert post.take()
    post.close()
    locks.close()


def test_checkpoints_elsewhere_are_gone_on_from_only_where_that_is_asked_for(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    """A new run under the same place would take them for its own; a run whose directory is lost has them left."""
    kept = tmp_path / "kept"
    run = {"name": "test", "dir": str(tmp_path / "run"), "num_steps": 9, "checkpoint_url": str(kept)}
    settings = make_settings(run=run)
    with pytest.raises(NotFoundError, match="holds no run to resume"):
        prepare_run_dir(settings, resume=True)
    checkpoints = RunCheckpoints(open_storage(str(kept)), num_kept=1)
    checkpoints.commit(checkpoints.begin(0), [], {"run": "test"})
    os.close(prepare_run_dir(settings, resume=False))  # an attempt that trained nothing
    told = f"run.checkpoint_url {kept} holds "
    assert f"{told}none yet" in _found(settings)
    checkpoints.commit(checkpoints.begin(4), [], {"run": "test"})
    with pytest.raises(
        RunExistsError, match=r"kept holds checkpoints of a run, the last of step 4; go on from it with"
    ):
        prepare_run_dir(settings, resume=False)
    assert f"{told}those of a run to step 4: train needs --resume or another place" in _found(settings)
    os.close(prepare_run_dir(settings, resume=True))


def _found(settings: RunSettings) -> str:
    """What `rolecall check` tells."""
    out = io.StringIO()
    find_problems(settings, out)
    return out.getvalue()


def test_a_place_that_is_taken_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model that the file names is not there: reading it would have told that."""
    config = write_light_config(tmp_path)
    directory, nowhere = load_settings(config).run.dir, f"--model.path={tmp_path}/none"
    (directory / "checkpoints" / "step-00000001").mkdir(parents=True)
    (directory / "identity.json").write_text("{}")
    assert main(["train", str(config), nowhere]) == 1
    assert capsys.readouterr().err == (
        f"rolecall: run.dir {directory} exists; resume that run with --resume, or name another with --run.dir\n"
    )
    assert main(["train", str(config), nowhere, "--resume"]) == 1
    assert f"run.dir {directory} holds no run to resume" in capsys.readouterr().err
