"""The checks that a GPU must pass before a run is trusted to it: 28 checks of the product's own code.

    python -m tools.gpu_acceptance --part 1 --out DIR          # kernels and the trainer
    python -m tools.gpu_acceptance --part 2 --out DIR          # memory, streams, NCCL
    python -m tools.gpu_acceptance --part 3 --out DIR          # a whole run, and the numbers that decide defaults
    python -m tools.gpu_acceptance --part 4 --out DIR          # speed beside others' figures
    python -m tools.gpu_acceptance --part 5 --out DIR          # vLLM
    python -m tools.gpu_acceptance --part 6 --out DIR          # images
    python -m tools.gpu_acceptance --part 7 --out DIR          # compiled layers
    python -m tools.gpu_acceptance --part 8 --out DIR          # Megatron-Core
    python -m tools.gpu_acceptance --part 1 --out DIR --dry    # the same code on CPUs, nothing judged by its speed

A part takes nine minutes at most. One GPU is enough: where two ranks share it, NCCL is told that they are on two hosts
(NCCL_HOSTID). Parts 5 and 6 alone need vLLM, part 6 torchvision, too, and part 8 megatron-core; in the others
transformers sample. Each check is a process of its own with a budget, and what it has found is on the disk before it
goes on, so that a crash or an overrun loses neither figures nor neighbours. Dry, shapes are tiny and Gloo stands in for
NCCL.

    catalogue.py   the checks, their budgets
    __main__.py    a part: starts each check, ends those that overrun, prints the table
    findings.py    what a check found, and the table made of it
    stage.py       device, shapes, random models and rows
    receiver.py    the other end of the weight channel
    the others     the checks
"""
