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
# The batch job of llama-slurm: `shardwright run` submits it from the folder, where Slurm starts it.
set -euo pipefail
resume=${1:-auto}
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
shardwright run . --resume "$resume" &
run=$!
told=
trap 'told=1; kill -USR1 "$run"' USR1 # shortly before the end: the ranks save a checkpoint and stop
code=138
while ((code == 138)); do # the signal ends `wait`, not the run
  code=0
  wait "$run" || code=$?
done
if [[ -n $told ]] && ((code == 0)) && grep -q '"status": "preempted"' run/status.json; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
