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

check_nodes() { # prints the nodes that are not fit to train
  local report node line
  report=$(timeout 300 srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none bash launch/preflight.sh) || true
  if [[ $report != *shardwright-node* ]]; then
    echo "job.sh: no node answers launch/preflight.sh; the nodes are not checked" >&2
    return
  fi
  for node in $(scontrol show hostnames "${SLURM_JOB_NODELIST:-}"); do
    line=$(grep -m 1 "^shardwright-node $node " <<<"$report") || line=
    line=${line#"shardwright-node $node "}
    if [[ $line != ok ]]; then
      echo "job.sh: node $node: ${line:-no answer}" >&2
      echo "$node"
    fi
  done
}
bad=$(check_nodes)
if [[ -n $bad ]]; then
  left_out+=${left_out:+,}${bad//$'\n'/,}
  if ((submissions < 3)); then
    sbatch --exclude="$left_out" launch/job.sh "$resume" "$left_out" "$((submissions + 1))"
    echo "job.sh: submitted again without $left_out" >&2
    exit 75
  fi
  echo "job.sh: submit the job without these nodes: sbatch --exclude=$left_out launch/job.sh $resume" >&2
  exit 75
fi

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
  ((signals == 0)) || scontrol requeue "$SLURM_JOB_ID" || true
  code=75
fi
exit "$code"
