#!/usr/bin/env bash
# One rank of llama-openmpi, started by mpirun: its place in the names that torch reads.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/../"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
export NCCL_DEBUG=WARN
export RANK=${OMPI_COMM_WORLD_RANK:?mpirun starts this file} WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
exec "${SHARDWRIGHT_PYTHON:-python}" -u train.py
