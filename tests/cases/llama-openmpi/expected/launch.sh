#!/usr/bin/env bash
# Starts llama-openmpi on 2 x 2 ranks through Open MPI's mpirun, from any of the hosts.
set -euo pipefail
# The hosts are named now: launch.sh HOSTFILE (lines "name slots=2", 2 of them).
hostfile=${1:?usage: launch.sh HOSTFILE}
[[ $hostfile == /* ]] || hostfile=$PWD/$hostfile
[[ -f $hostfile ]] || { echo "launch.sh: no file $hostfile" >&2; exit 1; }
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NCCL_DEBUG=WARN
# What launch/rank.sh needs: DeepSpeed tells mpirun neither where the ranks meet nor the interpreter.
MASTER_ADDR=$(awk '!/^[[:space:]]*(#|$)/ {print $1; exit}' "$hostfile")
export MASTER_ADDR
export MASTER_PORT=${MASTER_PORT:-29500}
SHARDWRIGHT_PYTHON=$(dirname -- "$(command -v deepspeed)")/python
export SHARDWRIGHT_PYTHON
# By which the ranks know each other; nobody else's connection is listened to.
export SHARDWRIGHT_TOKEN=${SHARDWRIGHT_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
safe='^[A-Za-z0-9_@%+=:,./^-]*$' # openmpi gets no quotes
env_file=$(mktemp) # deepspeed forwards few names by itself; these go by file, readable by this user only
trap 'rm -f "$env_file"' EXIT
for name in MASTER_ADDR MASTER_PORT SHARDWRIGHT_PYTHON PYTHONUNBUFFERED NCCL_DEBUG; do
  [[ -v $name ]] || continue
  [[ ${!name} =~ $safe ]] || { echo "launch.sh: openmpi cannot pass the value of $name" >&2; exit 1; }
  printf '%s=%s\n' "$name" "${!name}" >>"$env_file"
done
# By name: mpirun takes their values from its own environment, and hands them on beside every command line.
by_name=
# shellcheck disable=SC2043 # one name or more
for name in SHARDWRIGHT_TOKEN; do
  if [[ -v $name ]]; then by_name+=" -x $name"; fi
done
# Slots in the hostfile's order, as the plan counts ranks; ranks share their node's cores themselves.
DS_ENV_FILE=$env_file deepspeed --launcher openmpi --force_multi --no_ssh_check --hostfile "$hostfile" \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
  --launcher_args="--map-by slot --bind-to none$by_name" --no_python launch/rank.sh
