#!/usr/bin/env bash
# One node's task of llama-slurm. SIGTERM, which Slurm sends to tasks before it ends or preempts a job, asks the ranks to save and stop.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
signals=0
trap 'signals=$((signals + 1)); mkdir -p run; touch run/stop' TERM
bash launch/node.sh &
child=$!
seen=-1
while ((seen != signals)); do # a signal ends `wait`, not the process
  seen=$signals code=0
  wait "$child" || code=$?
done
exit "$code"
