"""Prompts of GSM8K's rows (arXiv:2110.14168): `question`, and `answer`, a solution that ends with #### and a number."""

from typing import Any

INSTRUCTION = "Reason step by step, and put the final answer into \\boxed{}."


def row(fields: dict[str, Any]) -> dict[str, Any]:
    """The prompt and its ground truth: the number behind ####, without thousands separators."""
    return {
        "prompt": f"{fields['question']}\n{INSTRUCTION}",
        "ground_truth": fields["answer"].rpartition("####")[2].strip().replace(",", ""),
    }
