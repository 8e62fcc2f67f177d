"""A whole run under mutual TLS whose certificates, keys and roots are all replaced again and again."""

from pathlib import Path

from rolecall.v1 import controller_pb2 as pb
from tests.fixtures_store import StoreUnderTest
from tests.twins.rotation import Rotation
from tests.twins.run import LightRun, balance, check_trained_once

ROTATIONS = 8


async def test_a_run_goes_on_while_everything_that_proves_who_calls_is_replaced(
    light_run: LightRun, store: StoreUnderTest, tmp_path: Path
) -> None:
    rotation = Rotation(tmp_path / "tls", store.run)
    rpc = {"tls": rotation.tls("controller").model_dump()}
    async with light_run(run={"num_steps": 100_000}, rpc=rpc) as run, run.controller() as life:
        async with run.rollout("rollout-0", token_s=0.002), run.rollout("rollout-1", token_s=0.002):
            await life.reaches(1)
            for _ in range(ROTATIONS):
                await rotation.turn()
                step = (await life.status()).step
                await life.reaches(step + 2)
            await life.stub.StopRun(pb.StopRunRequest())
            await life.ends()
            status = await life.status()
    assert (status.state, status.num_recoveries) == (pb.RUN_STATE_DONE, 0), status.last_failure
    admitted, trained, dropped, live = balance(run)
    assert (admitted, dropped) == (trained + live, 0)
    check_trained_once(run.actor.trainer, 2 * trained)
