#!/usr/bin/env bash
# Starts llama-two-nodes-fp16 on 2 x 4 ranks through pdsh, from any of the hosts.
set -euo pipefail
# launch.sh [HOSTFILE]: other hosts than the compiled ones.
hostfile=launch/hostfile
if (($#)); then [[ $1 == /* ]] && hostfile=$1 || hostfile=$PWD/$1; fi
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NCCL_DEBUG=WARN
# By which the ranks know each other; nobody else's connection is listened to.
export SHARDWRIGHT_TOKEN=${SHARDWRIGHT_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
safe='^[A-Za-z0-9_@%+=:,./^-]*$' # pdsh gets no quotes
env_file=$(mktemp) # deepspeed forwards few names by itself; these go by file, readable by this user only
trap 'rm -f "$env_file"' EXIT
for name in HF_HUB_OFFLINE TOKENIZERS_PARALLELISM NCCL_DEBUG; do
  [[ -v $name ]] || continue
  [[ ${!name} =~ $safe ]] || { echo "launch.sh: pdsh cannot pass the value of $name" >&2; exit 1; }
  printf '%s=%s\n' "$name" "${!name}" >>"$env_file"
done
[[ $PWD =~ $safe ]] || { echo "launch.sh: pdsh cannot pass the path $PWD" >&2; exit 1; }
# A command line can be read by everybody: these values go by ssh into each host's memory, where the ranks take them.
values() {
  # shellcheck disable=SC2043 # one name or more
  for name in SHARDWRIGHT_TOKEN HF_TOKEN; do
    if [[ -v $name ]]; then printf '%s=%s\0' "$name" "${!name}"; fi
  done
}
on_hosts() { # on_hosts COMMAND INPUT: at once; a host that does not answer is pdsh's to name
  local host
  for host in $(awk '!/^[[:space:]]*(#|$)/ {print $1}' "$hostfile"); do
    # shellcheck disable=SC2086 # several words
    "$2" | ssh ${PDSH_SSH_ARGS_APPEND:-} -oBatchMode=yes -oConnectTimeout=10 -- "$host" "$1" >/dev/null 2>&1 &
  done
  wait
}
SHARDWRIGHT_ENV_FILE=/dev/shm/shardwright-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export SHARDWRIGHT_ENV_FILE
trap 'code=$?; rm -f "$env_file"; ((code == 0)) || on_hosts "rm -f $SHARDWRIGHT_ENV_FILE" true' EXIT
on_hosts "umask 077; set -C; cat >$SHARDWRIGHT_ENV_FILE" values
printf 'SHARDWRIGHT_ENV_FILE=%s\n' "$SHARDWRIGHT_ENV_FILE" >>"$env_file"
DS_ENV_FILE=$env_file deepspeed --launcher pdsh --force_multi --hostfile "$hostfile" \
  --master_addr 10.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" train.py
