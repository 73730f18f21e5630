#!/usr/bin/env bash
# Starts old-folder on this machine, 2 ranks.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export DS_ACCELERATOR=cpu
# The hostfile and the address keep deepspeed away from /job/hostfile and from ssh.
exec deepspeed --hostfile launch/hostfile --no_ssh_check --master_addr 127.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" train.py
