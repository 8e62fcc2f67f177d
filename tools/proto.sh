#!/usr/bin/env bash
# Makes the stubs in rolecall/v1 from proto/. With --check: says which ones are stale and exits 1, changing nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

messages=(proto/rolecall/v1/*.proto)
mapfile -t services < <(grep -lE '^service ' "${messages[@]}")
"$bin/python" -m grpc_tools.protoc -Iproto --plugin="protoc-gen-mypy=$bin/protoc-gen-mypy" --python_out="$out" --mypy_out=quiet:"$out" "${messages[@]}"
"$bin/python" -m grpc_tools.protoc -Iproto --plugin="protoc-gen-mypy_grpc=$bin/protoc-gen-mypy_grpc" --grpc_python_out="$out" --mypy_grpc_out=quiet,only_async:"$out" "${services[@]}"

if [ "${1:-}" = --check ]; then
  if ! diff -rq --exclude=__pycache__ --exclude=__init__.py --exclude='*.proto' "$out/rolecall/v1" rolecall/v1; then
    echo "The stubs in rolecall/v1 are stale: run 'make proto' and commit what it changes." >&2
    exit 1
  fi
else
  find rolecall/v1 -name '*_pb2*' -type f -delete
  cp "$out"/rolecall/v1/* rolecall/v1/
fi
