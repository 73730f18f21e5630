"""Stand-ins for the programs that launch files call: each prints what it was given, then goes on as
the real one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_PRINT = "#!/usr/bin/env bash\nprintf '%s:' \"${0##*/}\"; printf '<%s>' \"$@\"; echo\n"
_SHIMS = {
    "deepspeed": '[[ -z ${DS_ENV_FILE:-} ]] || cat "$DS_ENV_FILE"\n'
    'echo "cwd=$PWD addr=${MASTER_ADDR:-} port=${MASTER_PORT:-} note=${NOTE:-} set=${SET_UP:-}"\n'
    'case "${!#}" in *rank.sh) OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 '
    "OMPI_COMM_WORLD_LOCAL_RANK=1 "
    'OMPI_COMM_WORLD_LOCAL_SIZE=2 "${!#}" ;; esac\n',
    "python": (
        'echo "RANK=$RANK WORLD_SIZE=$WORLD_SIZE LOCAL_RANK=$LOCAL_RANK set=${SET_UP:-} '
        'note=${NOTE:-}"\n'
    ),
    "srun": (
        "while [[ $1 == --* ]]; do shift; done\n"
        '[[ $2 == launch/preflight.sh ]] || SLURM_NODEID=1 exec "$@"\n'
        'for SLURMD_NODENAME in n1 n2; do export SLURMD_NODENAME; "$@"; done\n'
    ),
    "sbatch": (
        "export SLURM_JOB_ID=12 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='n[1-2]'; shift; "
        'bash "$@"\n'
    ),
    "scontrol": "printf 'n1\\nn2\\n'\n",
    "shardwright": (
        "mkdir -p run; bash launch.sh; code=$?\n"
        '[[ -n ${NOT_DONE:-} ]] || echo \'{"status": "done"}\' >run/status.json\n'
        "exit $code\n"
    ),
    "kubectl": "",
    "python3": f'exec {sys.executable} "$@"\n',  # starts `deepspeed`
}
_QUIET = ("scontrol", "python3")


def install(folder: Path) -> str:
    """Writes the programs to `folder`; returns a PATH that finds them first."""
    folder.mkdir(exist_ok=True)
    for name, rest in _SHIMS.items():
        (folder / name).write_text(("#!/usr/bin/env bash\n" if name in _QUIET else _PRINT) + rest)
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def shell_warnings(script: bytes) -> str:
    """Return what shellcheck says of a script; "" where it is not installed."""
    if shutil.which("shellcheck") is None:
        return ""
    command = ["shellcheck", "--severity=warning", "--shell=bash", "-"]
    return subprocess.run(command, input=script, capture_output=True).stdout.decode("utf-8")


def start(
    out: Path, path: str, *arguments: str, script: str = "launch.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    """A script of the compiled folder `out`, from the folder above."""
    return subprocess.run(
        ["bash", str(out / script), *arguments],
        capture_output=True,
        text=True,
        cwd=out.parent,
        env={"PATH": path, **env},
        timeout=60,
    )
