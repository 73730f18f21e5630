#!/usr/bin/env bash
# Checks a node before the ranks of llama-slurm start: prints the node's name, then "ok" or what is wrong. launch/job.sh runs it on every node.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
answer() {
  echo "shardwright-node ${SLURMD_NODENAME:-$(hostname -s)} $1"
  exit 0
}
[[ -r plan.json ]] || answer "cannot read $PWD/plan.json"
probe=/dev/shm/shardwright-preflight-$$
{ : >"$probe"; } 2>/dev/null || answer "cannot write to /dev/shm"
rm -f "$probe"
if command -v nvidia-smi >/dev/null; then
  gpus=$(timeout 60 nvidia-smi --list-gpus 2>&1) || answer "nvidia-smi fails: ${gpus%%$'\n'*}"
  count=$(grep -c '^GPU [0-9]' <<<"$gpus") || true
  ((count >= 2)) || answer "only $count of 2 GPUs answer"
  if timeout 60 nvidia-smi --query-remapped-rows=remapped_rows.failure --format=csv,noheader 2>/dev/null | grep -Eqi '^ *(1|yes) *$'; then
    answer "a GPU cannot replace damaged memory rows"
  fi
fi
answer ok
