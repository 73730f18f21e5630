#!/usr/bin/env bash
#SBATCH --job-name=llama-slurm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --account=research
#SBATCH --partition=gpu
#SBATCH --time=48:00:00
#SBATCH --mem=0
#SBATCH --constraint=h100&(ib|roce)
#SBATCH --exclude=gpu-[3,7-9]
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=run/slurm-%j.log
#SBATCH --mail-type=END
#SBATCH --comment="a second try"
#SBATCH --licenses=matlab
# The batch job of llama-slurm: `shardwright run` submits it from the folder, where Slurm starts it. It exits with 75 where the run is not done.
set -euo pipefail
resume=${1:-auto} left_out=${2:-'gpu-[3,7-9]'} submissions=${3:-0}
[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || resume=auto # it was queued again: go on where it stopped
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

ask() { # seconds, options of srun: has nodes answer launch/preflight.sh
  # A step whose node is lost holds its CPUs until Slurm knows that.
  SLURM_OVERLAP=1 timeout "$1" srun --ntasks-per-node=1 --cpu-bind=none "${@:2}" bash launch/preflight.sh || true
}
check_nodes() { # prints the nodes that are not fit to train
  local nodes report node line
  mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:-}")
  report=$(ask 300 --nodes=2 --ntasks=2)
  # One node that does not answer can end the question to all: each is asked by itself.
  report+=$'\n'$(for node in "${nodes[@]}"; do
    grep -q "^shardwright-node $node " <<<"$report" || ask 150 --nodes=1 --ntasks=1 --nodelist="$node" &
  done; wait)
  if [[ $report != *shardwright-node* ]]; then
    echo "job.sh: no node answers launch/preflight.sh; the nodes are not checked" >&2
    return
  fi
  for node in "${nodes[@]}"; do
    line=$(grep -m 1 "^shardwright-node $node " <<<"$report") || line=
    line=${line#"shardwright-node $node "}
    if [[ $line != ok ]]; then
      echo "job.sh: node $node: ${line:-no answer}" >&2
      echo "$node"
    fi
  done
}
leave_out() { # nodes, submissions before this one: ends the job, with another one in its place
  left_out+=${left_out:+,}${1//$'\n'/,}
  if (($2 < 3)); then
    # For a lost node Slurm would queue this job again too.
    scontrol update "JobId=$SLURM_JOB_ID" Requeue=0 || true
    sbatch --dependency="afterany:$SLURM_JOB_ID" --exclude="$left_out" launch/job.sh "$resume" "$left_out" "$(($2 + 1))"
    echo "job.sh: submitted again without $left_out" >&2
    exit 75
  fi
  echo "job.sh: submit the job without these nodes: sbatch --exclude=$left_out launch/job.sh $resume" >&2
  exit 75
}
bad=$(check_nodes)
[[ -z $bad ]] || leave_out "$bad" "$submissions"

shardwright run . --resume "$resume" &
child=$! signals=0
# USR1 comes shortly before the time limit, TERM before Slurm ends or preempts the job: the ranks save a checkpoint and stop.
trap 'signals=$((signals + 1)); kill -USR1 "$child" || true' USR1 TERM
seen=-1
while ((seen != signals)); do # a signal ends `wait`, not the process
  seen=$signals code=0
  wait "$child" || code=$?
done
if ((code == 0)) && ! grep -q '"status": "done"' run/status.json; then
  # A preempted job that ends before Slurm ends it is not queued again by Slurm.
  if ((signals)) || [[ $(scontrol show job "$SLURM_JOB_ID") == *PreemptTime=[0-9]* ]]; then
    scontrol requeue "$SLURM_JOB_ID" || true
  fi
  exit 75
fi
if ((code && signals == 0)); then # a lost node, perhaps
  bad=$(check_nodes)
  resume=auto
  [[ -z $bad ]] || leave_out "$bad" 0
fi
exit "$code"
