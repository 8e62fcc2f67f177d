"""TRL's GRPOTrainer on the job of vs_trl.py, in a process and an environment of its own (requirements/vs_trl.txt);
imports nothing of RoleCall.

Reads lines on stdin, each a number of batches to train, and answers each with one line of JSON: the seconds and the
sampled tokens of every batch. Ends with stdin. A batch is one round of generation and all optimizer steps on it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):  # type: ignore[misc]  # libraries of another environment have no types here
    """Lets the trainer go on for as many batches as the next line of stdin says, and times them."""

    def __init__(self, steps_per_batch: int) -> None:
        self._steps_per_batch = steps_per_batch
        self._left = 0
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._started = 0.0
        self._num_tokens = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The boundary between two batches."""
        if state.global_step % self._steps_per_batch:
            return
        if self._started:
            self._seconds.append(time.perf_counter() - self._started)
            self._tokens.append(self._num_tokens)
        if not self._left:
            self._take_turn(control)
        self._left -= 1
        self._num_tokens = 0
        self._started = time.perf_counter()

    def reward(
        self, completions: list[Any], completion_ids: list[list[int]], ground_truth: list[str], **_: Any
    ) -> list[float]:
        """1 for the exact answer, as the job's scorer; and the place where sampled tokens are counted."""
        self._num_tokens += sum(map(len, completion_ids))
        return [
            float(completion[0]["content"].strip() == truth)
            for completion, truth in zip(completions, ground_truth, strict=True)
        ]

    def _take_turn(self, control: Any) -> None:
        print(json.dumps({"seconds": self._seconds, "tokens": self._tokens}), file=sys.__stdout__, flush=True)
        self._seconds, self._tokens = [], []
        line = sys.stdin.readline()
        if line:
            self._left = int(line)
        else:
            control.should_training_stop = True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("prompts", "responses", "max-tokens", "minibatches"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    dataset = load_dataset("json", data_files=arguments.data, split="train", cache_dir=str(arguments.out / "cache"))
    dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    turns = Turns(arguments.minibatches)
    trainer = GRPOTrainer(
        model=arguments.model,
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        reward_funcs=turns.reward,
        train_dataset=dataset,
        callbacks=[turns],
        args=GRPOConfig(
            output_dir=str(arguments.out),
            num_generations=arguments.responses,
            max_completion_length=arguments.max_tokens,
            per_device_train_batch_size=arguments.prompts * arguments.responses // arguments.minibatches,
            steps_per_generation=arguments.minibatches,
            max_steps=10**6,
            # Weights stay as they are on both sides, so that all batches are alike; the work does not depend on it.
            learning_rate=1e-30,
            epsilon=0.2,
            epsilon_high=0.28,
            temperature=1.0,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,  # on by default; off is faster, and memory is not what is compared
            logging_steps=arguments.minibatches,  # one report a batch, as ours
            disable_tqdm=True,
            save_strategy="no",
            report_to="none",
        ),
    )
    sys.stdout = sys.stderr  # what the trainer prints is no answer
    trainer.train()


if __name__ == "__main__":
    main()
