"""The example of a data set in somebody else's form: what its function makes of rows, and that its file is one."""

import io
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rolecall.commands.check import find_problems
from rolecall.data.dataset import load_prompts
from rolecall.settings import load_settings
from tests.twins.launched import write_model

TASK = Path(__file__).parents[2] / "examples" / "gsm8k" / "task.yaml"
ROWS = [
    {"question": "Ann has 3 apples and eats 1. How many are left?", "answer": "3 - 1 = <<3-1=2>>2\n#### 2"},
    {"question": "A car costs $1,000 and a bike $250. Both?", "answer": "1,000 + 250 = 1,250\n#### 1,250"},
]


def test_its_rows_become_prompts_and_its_file_has_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    write_model(tmp_path / "model")
    given = {
        "run.dir": tmp_path / "run",
        "model.path": tmp_path / "model",
        "data.train": file,
        "evaluation.sets.test.path": file,
        "sampling.max_tokens": 64,
        "actor.devices": [],
        "rollout.devices": [],
    }
    settings = load_settings(TASK, [f"{name}={value}" for name, value in given.items()])
    prompts = load_prompts(settings.data.train, settings.data, settings.reward)
    assert [prompt.ground_truth for prompt in prompts] == ["2", "1250"]
    asked = prompts[0].messages[0][1]
    assert asked.endswith("are left?\nReason step by step, and put the final answer into \\boxed{}.")
    told = io.StringIO()
    assert find_problems(settings, told) == []
    assert "2 prompts through data.preprocess.function rows:row" in told.getvalue()
