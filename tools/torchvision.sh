#!/usr/bin/env bash
# Makes a folder with torchvision for a machine whose torch is a CPU build, of which there is no torchvision on PyPI: tools/torchvision.sh [FOLDER]
#
#     PYTHONPATH=FOLDER rolecall train ...      # by absolute path: for these processes alone
#
# It is the wheel of requirements/cuda.txt. Its compiled operators do not load over such a torch, and images need none of them, but torchvision looks
# for two of them when it is imported: they are declared, without code. It must not go into .venv, where `import vllm` of every run would find it.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-build/vision}"
pin=$(grep -E '^torchvision==' requirements/cuda.txt)

rm -rf "$folder.part" "$folder"
"${PYTHON:-.venv/bin/python}" -m pip install --quiet --no-deps --target "$folder.part" "$pin"
cat >> "$folder.part/torchvision/extension.py" <<'PYTHON'

if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
mv "$folder.part" "$folder"
