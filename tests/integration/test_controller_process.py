"""The controller's own process: what it leaves behind when it is stopped."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.twins.served import write_settings
from tests.waiting import until

ROOT = Path(__file__).parents[2]


async def test_a_stopped_controller_gives_the_run_back_and_is_not_done(store: StoreUnderTest, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "one", "ground_truth": "1"}\n')
    store.ledger.unlock()
    model = write_qwen3(tmp_path / "model")
    own, actor, reward = ({"address": f"127.0.0.1:{free_port()}"} for _ in range(3))
    config = write_settings(store, model, tmp_path, controller=own, reward=reward, actor=actor)
    log = tmp_path / "controller.log"
    with log.open("w") as out:
        controller = subprocess.Popen(
            [sys.executable, "-m", "services.controller", str(config)], cwd=ROOT, stdout=out, stderr=out
        )
        try:
            await until(lambda: holder(store) or controller.poll() is not None)
            assert controller.poll() is None, log.read_text()
            controller.send_signal(signal.SIGTERM)
            code = controller.wait(60)
        finally:
            controller.kill()
            controller.wait(60)
    assert (code, holder(store)) == (143, b""), log.read_text()
    assert "Error" not in log.read_text()


def holder(store: StoreUnderTest) -> bytes:
    """Who holds the run; empty: nobody."""
    (found,) = store.connection.command("HMGET", f"{{rl:{store.run}}}:run", "holder")
    return bytes(found or b"")
