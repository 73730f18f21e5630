#!/usr/bin/env bash
# Creates the JobSet of llama-jobset, 2 pods, in the cluster of kubectl's context.
set -euo pipefail
# Works from wherever the folder is, under any name.
here=${BASH_SOURCE[0]}
[[ $here == */* ]] || here=./$here
CDPATH='' cd -- "${here%/*}/"
kubectl create -f launch/jobset.yaml || {
  echo "launch.sh: where an earlier job is in the way: kubectl delete -f launch/jobset.yaml" >&2
  echo "launch.sh: where the cluster has no JobSets: install the JobSet controller (https://jobset.sigs.k8s.io), or set launch.kubernetes.kind: job" >&2
  exit 1
}
