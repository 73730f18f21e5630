#!/usr/bin/env bash
# Starts llama-slurm on the 2 nodes of the Slurm allocation that it is called in. `shardwright run` outside of one submits launch/job.sh.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
[[ -n ${SLURM_JOB_ID:-} ]] || { echo "launch.sh: not inside a Slurm allocation; submit with: shardwright run <this folder>" >&2; exit 1; }
[[ ${SLURM_JOB_NUM_NODES:-} == 2 ]] || { echo "launch.sh: the allocation has ${SLURM_JOB_NUM_NODES:-no} nodes, the plan 2" >&2; exit 1; }
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # nodes may be shared with another run
# By which the ranks know each other; nobody else's connection is listened to.
export SHARDWRIGHT_TOKEN=${SHARDWRIGHT_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
exec srun --job-name=ranks --nodelist="$SLURM_JOB_NODELIST" --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  bash launch/node.sh
