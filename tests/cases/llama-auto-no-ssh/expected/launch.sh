#!/usr/bin/env bash
# Starts this node's ranks of llama-auto-no-ssh: run it once on each of the 2 nodes, with NODE_RANK=0...1.
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
exec deepspeed --no_ssh --no_ssh_check --hostfile "$hostfile" \
  --node_rank "${NODE_RANK:?give the number of this node, from 0}" \
  --master_addr "${MASTER_ADDR:?give the address of node 0}" \
  --master_port "${MASTER_PORT:-29500}" train.py
