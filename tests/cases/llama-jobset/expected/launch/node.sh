#!/usr/bin/env bash
# Starts one node's ranks of llama-jobset; launch.sh has it run on every node.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
SHARDWRIGHT_FOLDER=$PWD
set +eu +o pipefail # the user's script is not written for them, and may go elsewhere
# shellcheck source=/dev/null
source launch/setup.sh
set -euo pipefail
CDPATH='' cd -- "$SHARDWRIGHT_FOLDER"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# `shardwright run` is not there to choose a checkpoint: rank 0 does.
export SHARDWRIGHT_RESUME=${SHARDWRIGHT_RESUME:-auto}
export SHARDWRIGHT_PREEMPTED_EXIT=75 # a pod that was told to stop has not succeeded: the job starts it again
# Any names will do in this hostfile: each node is told its number.
exec deepspeed --no_ssh --no_ssh_check --hostfile launch/hostfile \
  --node_rank "${JOB_COMPLETION_INDEX:?an Indexed Job starts this file}" \
  --master_addr "${MASTER_ADDR:?give the address of node 0}" \
  --master_port "${MASTER_PORT:-29500}" train.py
