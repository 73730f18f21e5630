#!/usr/bin/env bash
# Creates the Job of llama-kubernetes, 2 pods, in the cluster of kubectl's context.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
kubectl apply -f launch/service.yaml
kubectl create -f launch/job.yaml || {
  echo "launch.sh: where an earlier job is in the way: kubectl delete -f launch/job.yaml" >&2
  exit 1
}
