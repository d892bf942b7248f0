#!/usr/bin/env bash
# Runs a command in a machine of its own, in which the tests build clouds: own processes, network, /etc and /run. Nothing of it
# outlives the command, and nothing in it reaches beyond this machine. Needs root; installs what is missing where apt-get is.
set -euo pipefail

declare -A NEEDED=(
  [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge [sshd]=openssh-server [ssh]=openssh-client
  [rsync]=rsync [ip]=iproute2 [sudo]=sudo [nc]=netcat-openbsd
)

fail() {
  echo "make test-clouds: $1" >&2
  exit 1
}

if [ "${ECHO2_LAB:-}" != entered ]; then
  [ "$(id -u)" = 0 ] || fail "it builds networks and a Slurm cluster in namespaces, which takes root: run it as root"
  export PATH="$PATH:/usr/sbin:/sbin" DEBIAN_FRONTEND=noninteractive
  missing=()
  for program in "${!NEEDED[@]}"; do
    command -v "$program" > /dev/null || missing+=("${NEEDED[$program]}")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get > /dev/null || fail "${missing[*]} are missing, and there is no apt-get: install them"
    echo "== installing ${missing[*]}"
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends "${missing[@]}"; } > /dev/null 2>&1 < /dev/null \
      || fail "apt-get could not install ${missing[*]}: install them"
  fi
  export ECHO2_LAB=entered
  exec unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc "$0" "$@"
fi

mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/sshd /run/lab/etc /run/lab/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/lab/etc,workdir=/run/lab/work /etc
ip link set lo up
ip link add lab0 type bridge
ip link set lab0 up
# Not exec: this shell is what takes in the processes that lose their parents.
"$@"
