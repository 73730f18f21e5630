#!/usr/bin/env bash
# Starts one node's ranks of llama-kubernetes; launch.sh has it run on every node.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NCCL_DEBUG=WARN
# `shardwright run` is not there to choose a checkpoint: rank 0 does.
export SHARDWRIGHT_RESUME=${SHARDWRIGHT_RESUME:-auto}
export SHARDWRIGHT_PREEMPTED_EXIT=75 # a node that was told to stop has not succeeded: it is started again
# SIGTERM, which schedulers send to some or all processes before they end them, asks the ranks to save and stop.
# DeepSpeed's launcher would end the ranks: it is started with SIGTERM blocked.
signals=0
trap 'signals=$((signals + 1)); mkdir -p run; touch run/stop' TERM
python3 -I -c 'import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execvp(sys.argv[1], sys.argv[1:])' \
  deepspeed --no_ssh --no_ssh_check --hostfile launch/hostfile \
  --node_rank "${JOB_COMPLETION_INDEX:?an Indexed Job starts this file}" \
  --master_addr "${MASTER_ADDR:?give the address of node 0}" \
  --master_port "${MASTER_PORT:-29500}" train.py &
child=$!
seen=-1
while ((seen != signals)); do # a signal ends `wait`, not the process
  seen=$signals code=0
  wait "$child" || code=$?
done
exit "$code"
