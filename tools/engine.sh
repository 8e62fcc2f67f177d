#!/bin/bash
# A container engine for `make compose` and `make test-deploy`: `eval "$(tools/engine.sh)"` uses the one that answers. Where none does, root on
# Debian 12 or 13 gets one under build/engine: packages of Debian's, unpacked and not installed, on a socket of its own. `tools/engine.sh stop`
# ends that one, and leaves neither bridges nor rules of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=$PWD/build/engine
say() { echo "engine: $*" >&2; }

stop() {
  local pid bridges; pid=$(cat "$engine/docker.pid" 2>/dev/null) || return 0
  bridges=$("$engine/root/usr/bin/docker" --host "unix://$engine/docker.sock" network ls --quiet --filter driver=bridge | sed 's/^/br-/')
  kill "$pid"
  for _ in $(seq 60); do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
  for bridge in docker0 $bridges; do ip link del "$bridge" 2>/dev/null || true; done
  iptables-restore < "$engine/iptables"
}

refuse() {
  say "no container engine answers, and $1. Install Docker Engine with its Compose plugin (packages docker.io and docker-compose of Debian 13,"
  say "or docker-ce and docker-compose-plugin of Docker's), start it, and run this again."
  exit 1
}

fetch() {
  local codename packages=(docker.io containerd docker-cli docker-compose docker-buildx kustomize)
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  [ "$(id -u)" = 0 ] || refuse "only root can start one"
  [[ $codename = bookworm || $codename = trixie ]] || refuse "this is neither Debian 12 nor 13"
  command -v iptables debootstrap > /dev/null || { say "installing iptables and debootstrap"; apt-get install -y -qq iptables debootstrap >&2; }
  say "fetching the packages of the engine, and kustomize"
  mkdir -p "$engine"/{apt/lists/partial,apt/archives/partial,apt/sources,packages,root}
  # the machine's own sources of packages; the Compose of Debian 12 is too old, so its successor's, but for runc, which needs this libc
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    if [ -s "$file" ]; then sed "s/\b$codename\b/trixie/g" "$file" > "$engine/apt/sources/$(basename "$file")"; fi
  done
  local options=(-o "Dir::State::lists=$engine/apt/lists" -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$engine/apt/sources"
    -o "Dir::Cache::archives=$engine/apt/archives")
  apt-get "${options[@]}" update -qq >&2 || true
  (cd "$engine/packages" && apt-get "${options[@]}" download -qq "${packages[@]}" 2> /dev/null) || refuse "apt does not find its packages"
  apt-get update -qq >&2 && (cd "$engine/packages" && apt-get download -qq runc 2> /dev/null) || refuse "apt does not find runc"
  for package in "$engine"/packages/*.deb; do dpkg -x "$package" "$engine/root"; done
  mkdir -p "$engine/config/cli-plugins"
  for plugin in docker-compose docker-buildx; do ln -sf "$engine/root/usr/libexec/docker/cli-plugins/$plugin" "$engine/config/cli-plugins/"; done
  touch "$engine/fetched"
}

start() {
  cat > "$engine/daemon.json" <<J
{"data-root": "$engine/data", "exec-root": "$engine/exec", "pidfile": "$engine/docker.pid", "hosts": ["unix://$engine/docker.sock"],
 "bip": "172.31.250.1/24", "userland-proxy": false}
J
  say "starting it"
  iptables-save > "$engine/iptables"
  PATH=$engine/root/usr/sbin:$engine/root/usr/bin:$PATH setsid dockerd --config-file "$engine/daemon.json" > "$engine/log" 2>&1 &
  for _ in $(seq 60); do
    if docker info > /dev/null 2>&1; then weigh; return; fi
    sleep 0.5
  done
  say "it did not start; the end of $engine/log:"; tail -n 5 "$engine/log" >&2
  exit 1
}

weigh() {  # the kernel gives all containers together the share of one session; a fleet is several
  mkdir -p /sys/fs/cgroup/cpu/docker 2> /dev/null && echo 4096 > /sys/fs/cgroup/cpu/docker/cpu.shares || true
}

base_image() {  # what the Dockerfile begins with: pulled, or made of Debian's packages where no registry is reached
  if docker image inspect debian:bookworm-slim > /dev/null 2>&1 || timeout 120 docker pull -q debian:bookworm-slim > /dev/null 2>&1; then return; fi
  command -v debootstrap > /dev/null || refuse "no registry is reached for debian:bookworm-slim, nor is debootstrap here"
  say "making debian:bookworm-slim"
  debootstrap --variant=minbase bookworm "$engine/debian" >&2
  tar -C "$engine/debian" -c . | docker import - debian:bookworm-slim > /dev/null
  rm -rf "$engine/debian"
}

if [ "${1:-}" = stop ]; then stop; exit; fi
if ! { docker info && docker compose version; } > /dev/null 2>&1; then
  export PATH=$engine/root/usr/bin:$PATH DOCKER_HOST=unix://$engine/docker.sock DOCKER_CONFIG=$engine/config
  [ -e "$engine/fetched" ] || fetch
  docker info > /dev/null 2>&1 || start
  echo "export PATH=$engine/root/usr/bin:\$PATH DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG"
fi
base_image
