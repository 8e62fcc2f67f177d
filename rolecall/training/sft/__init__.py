"""Supervised fine-tuning on examples, the program behind `rolecall sft`: `python -m rolecall.training.sft`."""
