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
safe='^[A-Za-z0-9_@%+=:,./-]*$' # pdsh gets no quotes
env_file=$(mktemp) # deepspeed forwards few names by itself; these go by file, readable by this user only
trap 'rm -f "$env_file"' EXIT
for name in HF_HUB_OFFLINE TOKENIZERS_PARALLELISM NCCL_DEBUG HF_TOKEN; do
  [[ -v $name ]] || continue
  [[ ${!name} =~ $safe ]] || { echo "launch.sh: pdsh cannot pass the value of $name" >&2; exit 1; }
  printf '%s=%s\n' "$name" "${!name}" >>"$env_file"
done
[[ $PWD =~ $safe ]] || { echo "launch.sh: pdsh cannot pass the path $PWD" >&2; exit 1; }
DS_ENV_FILE=$env_file deepspeed --launcher pdsh --force_multi --hostfile "$hostfile" \
  --master_addr 10.0.0.1 \
  --master_port "${MASTER_PORT:-29500}" train.py
