#!/bin/bash
# Makes the images rolecall-{light,trainer,rollout}:dev of this tree: images.sh [cpu|cuda]. Packages come as wheels that pip of .venv fetches, by
# its own settings, into build/wheels, so that no index, password or root certificate of this machine is needed inside the build.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=${1:-cpu}
wheels=build/wheels/$lock
mkdir -p "$wheels"
touch "$wheels/fetched.txt"
if grep -vxFf "$wheels/fetched.txt" "requirements/$lock.txt" > "$wheels/missing.txt"; then
  echo "images: fetching $(wc -l < "$wheels/missing.txt") wheels of requirements/$lock.txt" >&2
  .venv/bin/python -m pip wheel --quiet --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement "$wheels/missing.txt" --wheel-dir "$wheels"
  cp "requirements/$lock.txt" "$wheels/fetched.txt"
fi
revision=$(git describe --always --dirty --abbrev=12 2> /dev/null || echo unknown)
for target in light trainer rollout; do
  docker build --quiet --file deploy/docker/Dockerfile --target "$target" --tag "rolecall-$target:dev" --build-arg LOCK="$lock" \
    --build-arg PIP_NO_INDEX=1 --build-context wheels="$wheels" --build-arg REVISION="$revision" . > /dev/null
  echo "images: rolecall-$target:dev, $(($(docker image inspect --format '{{.Size}}' "rolecall-$target:dev") / 1000000)) MB" >&2
done
