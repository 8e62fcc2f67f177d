"""A role's process starts with clear errors, stops when told, ends with its launcher and says once why it failed."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rolecall.rpc import role_process
from rolecall.settings import child_environment, store_url_file
from tests.conftest import MakeSettings
from tests.file_limits import few_files

ROOT = Path(__file__).parents[2]
Role = subprocess.Popen[str]


@pytest.fixture
def config(make_settings: MakeSettings, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make_settings().model_dump(mode="json", exclude_unset=True)))
    return path


class Launcher:
    """Starts roles and leaves none behind."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._roles: list[Role] = []

    def start(self, how: str, *arguments: str, **environment: str) -> Role:
        command = [sys.executable, "-W", "error", "-m", "tests.contract.a_role", how, str(self._config), *arguments]
        role = subprocess.Popen(
            command,
            cwd=ROOT,
            env=child_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._roles.append(role)
        return role

    def end(self) -> None:
        for role in self._roles:
            role.kill()
            role.communicate()


@pytest.fixture
def launcher(config: Path) -> Iterator[Launcher]:
    launcher = Launcher(config)
    yield launcher
    launcher.end()


def up(role: Role) -> Role:
    assert role.stdout is not None
    line = role.stdout.readline()
    assert line == "up\n", role.communicate()[1]
    return role


def test_a_role_may_open_as_many_files_as_the_machine_lets_it(launcher: Launcher) -> None:
    with few_files():
        role = up(launcher.start("serve"))
    soft, hard = resource.prlimit(role.pid, resource.RLIMIT_NOFILE)
    assert soft == hard > 256


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_role_and_it_exits_clean(launcher: Launcher, number: signal.Signals) -> None:
    role = up(launcher.start("serve"))
    role.send_signal(number)
    out, err = role.communicate(timeout=50)
    assert (role.returncode, out) == (0, "drained\n"), err
    assert "failed" not in err
    assert "Traceback" not in err


def test_a_role_that_a_signal_stopped_before_its_end_is_not_done(launcher: Launcher) -> None:
    role = up(launcher.start("be_stopped_before_the_end"))
    role.send_signal(signal.SIGTERM)
    out, err = role.communicate(timeout=50)
    assert (role.returncode, out) == (143, "drained\n"), err
    assert "failed" not in err


def test_a_role_that_is_asked_to_stop_from_within_drains_and_its_first_signal_cuts_nothing_short(
    launcher: Launcher,
) -> None:
    out, err = launcher.start("be_asked_to_stop").communicate(timeout=50)
    assert out == "up\ndrained\n", err
    assert "SIGTERM: stopping" in err


def test_a_role_whose_work_ends_as_cancelled_has_failed(launcher: Launcher) -> None:
    role = launcher.start("be_cancelled")
    _, err = role.communicate(timeout=60)
    assert role.returncode == role_process.RESTART, err


def test_a_signal_during_start_ends_the_role_at_once(launcher: Launcher) -> None:
    role = up(launcher.start("load"))
    role.send_signal(signal.SIGTERM)
    _, err = role.communicate(timeout=50)
    assert role.returncode == 0, err


def test_a_failure_is_said_in_one_clear_line_after_the_end_of_its_traceback(launcher: Launcher) -> None:
    role = launcher.start("crash")
    _, err = role.communicate(timeout=60)
    assert role.returncode == role_process.RESTART
    assert err.splitlines()[-1] == "actor failed: ValueError: shape (3, 4) is not (4, 3)", err
    assert "in crash" in err
    assert "never awaited" not in err


def test_a_crash_of_native_code_says_where_each_thread_was(launcher: Launcher) -> None:
    role = launcher.start("crash_natively")
    _, err = role.communicate(timeout=60)
    assert role.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in err
    assert "in crash_natively" in err


def test_a_failure_in_the_background_ends_the_role_with_its_message(launcher: Launcher) -> None:
    role = launcher.start("lose_a_rank")
    _, err = role.communicate(timeout=60)
    assert role.returncode == role_process.RESTART
    assert err.splitlines()[-1] == "actor failed: rank 1 died in backward; see actor.1.log", err


def test_a_log_that_finds_no_space_makes_no_failure_final(config: Path) -> None:
    command = [sys.executable, "-m", "tests.contract.a_role", "lose_a_rank", str(config)]
    with open("/dev/full", "w") as full:
        code = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, timeout=60).returncode
    assert code in (role_process.RESTART, 120), (
        "120: the interpreter could not flush its own streams, which no launcher takes for final either"
    )


def test_an_error_that_no_restart_mends_has_an_exit_code_of_its_own(launcher: Launcher) -> None:
    role = launcher.start("refuse")
    _, err = role.communicate(timeout=60)
    assert role.returncode == role_process.FINAL
    assert err.splitlines()[-1] == "actor failed: the checkpoint is of another model", err


def test_an_end_that_the_settings_foresee_has_no_traceback(launcher: Launcher) -> None:
    role = launcher.start("spend_a_budget")
    _, err = role.communicate(timeout=60)
    assert role.returncode == role_process.FINAL
    assert err.splitlines()[-1] == "actor failed: filters dropped 6 groups within a step", err
    assert "raceback" not in err


def test_a_process_given_up_as_hung_ends_though_its_event_loop_is_stuck(launcher: Launcher) -> None:
    role = up(launcher.start("hang_for_good"))
    _, err = role.communicate(timeout=50)  # its event loop is stuck for 60 s
    assert role.returncode == role_process.RESTART
    assert err.splitlines()[-1] == "actor failed: no progress for 30 s", err


def test_a_lost_worker_is_not_drained(launcher: Launcher) -> None:
    role = up(launcher.start("be_lost"))
    out, err = role.communicate(timeout=60)
    assert role.returncode == role_process.RESTART, err
    assert "drained" not in out


def test_neither_a_thread_nor_an_end_that_blocks_keeps_a_role_that_was_stopped_or_failed(launcher: Launcher) -> None:
    hung, blocked, failed = (launcher.start(how) for how in ("hang", "block_at_its_end", "fail_and_block"))
    for role in (hung, blocked):
        up(role).send_signal(signal.SIGTERM)
    said = {role: role.communicate(timeout=50)[1] for role in (hung, blocked, failed)}  # they hang for 60 s
    assert [role.returncode for role in said] == [0, 0, role_process.RESTART], said
    assert "leaving threads that did not end within 5 s: device" in said[hung]
    assert "leaving threads that did not end within 5 s: MainThread" in said[blocked]
    assert said[failed].splitlines()[-1] == "actor failed: ValueError: shape (3, 4) is not (4, 3)", "the reason is last"


def test_a_drain_that_hangs_does_not_keep_the_process(launcher: Launcher) -> None:
    role = up(launcher.start("hang_in_drain"))
    role.send_signal(signal.SIGTERM)
    _, err = role.communicate(timeout=50)
    assert role.returncode == 0
    assert "draining took longer than 0.3 s" in err


def test_a_role_ends_when_its_launcher_is_killed(config: Path, tmp_path: Path) -> None:
    starter = (
        "import subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-m', 'tests.contract.a_role', 'load', sys.argv[1]], "
        "stdout=subprocess.PIPE, text=True); "
        "print(p.stdout.readline().strip(), p.pid, flush=True); p.wait()"
    )
    environment = child_environment({"ROLECALL_DIE_WITH_PARENT": "1"})
    with subprocess.Popen(
        [sys.executable, "-c", starter, str(config)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        word, pid = launcher.stdout.readline().split()
        assert word == "up"
        launcher.kill()
    deadline = time.monotonic() + 50.0  # it would end by itself after 60 s
    while _alive(int(pid)):
        assert time.monotonic() < deadline, "the role outlived its launcher"
        time.sleep(0.02)


def test_overrides_name_file_and_the_launcher_s_incarnation_reach_the_role(launcher: Launcher) -> None:
    role = launcher.start("who", "--name", "actor-b", "--run.num_steps", "7", ROLECALL_INCARNATION="0badcafe")
    out, err = role.communicate(timeout=60)
    assert out == "actor-b 7 0badcafe\n", err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["absent.yaml"], "actor failed: cannot read the configuration absent.yaml"),
        ([], "actor failed: CONFIG, the run's YAML file, is missing"),
        (["run.yaml", "--name"], "actor failed: --name needs a value"),
        (["run.yaml", "again.yaml"], "actor failed: unexpected argument 'again.yaml'"),
        (["--speed", "3"], "actor failed: unexpected argument '--speed'"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        role_process.parse_args("actor", arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(line)


def test_a_bad_override_names_its_key(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        role_process.parse_args("actor", [str(config), "--run.num_steps=-1"])
    assert "run.num_steps" in capsys.readouterr().err


def test_a_role_started_by_hand_finds_the_embedded_store_of_its_run(config: Path, tmp_path: Path) -> None:
    file = store_url_file(tmp_path / "run", "rollout")
    assert role_process.parse_args("rollout", [str(config)]).settings.store.url is None
    file.parent.mkdir(parents=True)
    file.write_text("unix:///run/store.sock\n")
    found = role_process.parse_args("rollout", [str(config)]).settings.store.url
    assert found is not None
    assert found.get_secret_value() == "unix:///run/store.sock"
    given = role_process.parse_args("rollout", [str(config), "--store.url", "redis://elsewhere"]).settings.store.url
    assert given is not None
    assert given.get_secret_value() == "redis://elsewhere"


def test_each_start_is_another_incarnation_and_every_worker_has_a_name(config: Path) -> None:
    first, second = (role_process.parse_args("rollout", [str(config)]) for _ in range(2))
    assert first.incarnation != second.incarnation
    assert first.worker != second.worker
    assert role_process.parse_args("reward", ["--name=b", str(config)]).worker == "b"
    assert role_process.parse_args("reward", [str(config)]).worker == "reward"


def test_a_reference_is_named_after_its_instance(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kl = ["--references.ref", "{}", "--algorithm.kl", "{reference: ref, kl_coef: 0.1}"]
    assert role_process.parse_args("reference", [str(config), *kl]).worker == "ref"
    with pytest.raises(SystemExit):
        role_process.parse_args("reference", [str(config)])
    assert "--name is missing" in capsys.readouterr().err


def test_help_and_bad_configurations_are_instant_and_load_nothing_heavy() -> None:
    code = (
        "import sys, rolecall.rpc.role_process as p\n"
        "heavy = {'grpc', 'torch', 'vllm', 'numpy', 'transformers', 'opentelemetry', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "p.parse_args('actor', ['--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "usage: rolecall serve actor CONFIG" in result.stdout


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has reaped yet is dead.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
