#!/usr/bin/env bash
# Starts one node's ranks of llama-slurm; launch.sh has it run on every node.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
SHARDWRIGHT_FOLDER=$PWD
set +eu +o pipefail # the user's script is not written for them, and may go elsewhere
shardwright_check() { # CODE FILE LINE COMMAND: a module or an environment that does not load stops the job
  local line
  line=$(sed -n "$3{s/^[[:space:]]*//;p;}" "$2" 2>/dev/null) || line=
  case ${line:-$4} in
    module\ *|ml\ *|spack\ *|conda\ *|mamba\ *|micromamba\ *)
      echo "$2, line $3: '${line:-$4}' failed with exit code $1; the ranks are not started" >&2
      exit 1 ;;
  esac
}
trap 'shardwright_check "$?" "${BASH_SOURCE[0]}" "$LINENO" "$BASH_COMMAND"' ERR
# shellcheck source=/dev/null
source "$SHARDWRIGHT_FOLDER/launch/setup.sh"
trap - ERR
set -euo pipefail
CDPATH='' cd -- "$SHARDWRIGHT_FOLDER"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NCCL_DEBUG=WARN
# Any names will do in this hostfile: each node is told its number.
exec deepspeed --no_ssh --no_ssh_check --hostfile launch/hostfile \
  --node_rank "${SLURM_NODEID:?srun starts this file}" \
  --master_addr "${MASTER_ADDR:?give the address of node 0}" \
  --master_port "${MASTER_PORT:-29500}" train.py
