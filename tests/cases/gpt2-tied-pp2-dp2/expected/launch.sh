#!/usr/bin/env bash
# Starts gpt2-tied-pp2-dp2 on this machine, 4 ranks.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# SIGTERM, which schedulers send to some or all processes before they end them, asks the ranks to save and stop.
# DeepSpeed's launcher would end the ranks: it is started with SIGTERM blocked.
signals=0
trap 'signals=$((signals + 1)); mkdir -p run; touch run/stop' TERM
python3 -I -c 'import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execvp(sys.argv[1], sys.argv[1:])' \
  deepspeed --hostfile launch/hostfile --no_ssh_check --master_addr 127.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" train.py &
child=$!
seen=-1
while ((seen != signals)); do # a signal ends `wait`, not the process
  seen=$signals code=0
  wait "$child" || code=$?
done
exit "$code"
