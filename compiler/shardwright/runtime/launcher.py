"""`run`: starts the real `deepspeed` launcher on a compiled folder, streams rank 0, and tells how it ended.

Runs in the user's shell: no torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import read_plan
from shardwright.runtime.checkpoint_index import choose_checkpoint, set_aside
from shardwright.runtime.failure import report_failure
from shardwright.runtime.journal import PROGRESS, read_json, write_json
from shardwright.runtime.progress import Progress

SCRIPT = "train.py"
"""The one fixed relative script that `deepspeed` is given, with no user argument: its pdsh path does not quote."""

TESTED = {"deepspeed": ">=0.19.8,<0.20", "transformers": ">=5.20,<6", "torch": ">=2.10,<3"}

_PLAIN = re.compile(r"[\w@%+=:,./-]*")
_CHATTER = re.compile(
    "|".join(
        (
            r"(\S+: )?\[20\d\d-",  # DeepSpeed's and torch's log lines
            r"(MA|CPU Virtual Memory:|before|after|begin|end) ",  # DeepSpeed's memory reports
            r"(Using topology:|SEED_LAYERS=|stage=\d|\s+\d+: \w+$|  loss: )",  # PipelineModule's construction
            r"(\[Gloo\]|Rank: |\[rank\d+\]:\[W|W\d{4} )",
        )
    )
)
"""What DeepSpeed and torch say in passing: in run/launcher.log, not on the terminal."""


def run_folder(folder: Path, hostfile: Path | None, resume: str) -> int:
    """resume: auto | never | a step folder. Returns the exit code: 0 done or preempted, 1 refused, 3 not finished."""
    plan = load_plan(folder)
    for warning in check_versions(plan):
        print(warning, file=sys.stderr)
    _check_machine(plan, folder, hostfile)
    (folder / "run").mkdir(exist_ok=True)
    with _lock(folder):
        checkpoint = choose_checkpoint(plan, folder, resume)
        if checkpoint and int(checkpoint.name.rsplit("-", 1)[1]) >= plan.training.steps:
            print(f"already trained to its last step: {checkpoint} (`--resume never` starts again)")
            return 0
        attempt = _begin_attempt(plan, folder, checkpoint, fresh=resume == "never")
        code = _launch(plan, folder, hostfile)
        return _conclude(plan, folder, attempt, code)


def load_plan(folder: Path) -> Plan:
    """Raises Refusal where `folder` is not a compiled folder of this version."""
    try:
        return read_plan(folder)
    except (OSError, ValueError) as error:
        why = "it has no plan.json" if isinstance(error, OSError) else str(error).splitlines()[0]
        raise Refusal(
            Diagnostic(
                code="SW6001",
                message=f"{str(folder)!r} is not a compiled folder: {why}",
                help="Make one with `shardwright compile RECIPE -o DIR`.",
            )
        ) from None


def check_versions(plan: Plan) -> list[str]:
    """Warnings for versions that differ from the plan's inside the tested range; Refusal outside it."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    warnings, errors = [], []
    for name, tested in TESTED.items():
        planned, installed = getattr(plan.versions, name), metadata.version(name)
        if Version(installed).base_version == Version(planned).base_version:
            continue
        if SpecifierSet(tested).contains(Version(installed).base_version):
            warnings.append(
                f"warning[SW6002]: planned with {name} {planned}, running with {installed} (tested: {tested})"
            )
        else:
            errors.append(
                Diagnostic(
                    code="SW6002",
                    message=f"planned with {name} {planned}, but {installed} is installed (tested: {tested})",
                    help=f"Install {name} {planned}, or compile the recipe again here.",
                )
            )
    if errors:
        raise Refusal(*errors)
    return warnings


def _check_machine(plan: Plan, folder: Path, hostfile: Path | None) -> None:
    if plan.is_cpu and plan.training.precision == "fp16":
        raise Refusal(
            Diagnostic(
                code="SW6004",
                message="fp16 does not run on a CPU: DeepSpeed refuses it",
                help="Set training.precision to bf16 or fp32 and compile again; fp16 plans run on GPUs.",
            )
        )
    if plan.nodes == 1:
        return
    if _hostfile(plan, folder, hostfile) is None:
        raise Refusal(
            Diagnostic(
                code="SW6003",
                message=f"the plan is for {plan.nodes} nodes and no hostfile says which",
                help="Give `--hostfile FILE` with a line `name slots=N` for each node.",
            )
        )
    words = {"the folder's path": str(folder.resolve()), **{f"launch.env {k}": v for k, v in plan.launch.env}}
    bad = [f"{what} {value!r}" for what, value in words.items() if not _PLAIN.fullmatch(value)]
    if bad:
        raise Refusal(
            Diagnostic(
                code="SW6005",
                message=f"pdsh would not pass {', '.join(bad)} on as it is: the launcher does not quote",
                help="Use letters, digits and @%+=:,./-_ only.",
            )
        )


def _hostfile(plan: Plan, folder: Path, given: Path | None) -> Path | None:
    compiled = folder / "launch" / "hostfile"
    return given or (compiled if compiled.is_file() else None)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / "run" / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refusal(
                Diagnostic(
                    code="SW6006",
                    message=f"another `shardwright run` of {str(folder)!r} is alive",
                    help="Wait for it, or end it: `touch run/stop` in the folder saves a checkpoint and stops.",
                )
            ) from None
        yield


def _begin_attempt(plan: Plan, folder: Path, checkpoint: Path | None, *, fresh: bool) -> int:
    run = folder / "run"
    attempt = int(str(read_json(run / "attempt.json").get("attempt", 0))) + 1
    if fresh:
        set_aside(plan, folder, attempt)
    for stale in ("status.json", "stop"):
        (run / stale).unlink(missing_ok=True)
    for leftovers in ("errors", "logs", "ranks"):
        shutil.rmtree(run / leftovers, ignore_errors=True)
    write_json(run / "attempt.json", {"attempt": attempt, "resume": str(checkpoint) if checkpoint else None})
    return attempt


def command(plan: Plan, hostfile: Path | None) -> list[str]:
    """The launcher's command line; the working directory is the compiled folder."""
    script = Path(sys.executable).parent / "deepspeed"
    program = str(script) if script.exists() else shutil.which("deepspeed")
    if program is None:
        raise Refusal(
            Diagnostic(
                code="SW6005",
                message="there is no `deepspeed` command in this environment",
                help="Install shardwright with its dependencies (pip install shardwright) and use its command.",
            )
        )
    port = str(plan.launch.master_port or free_port())
    if plan.nodes == 1:
        # A hostfile that does not exist: the launcher would else pick up the machine's own /job/hostfile.
        hosts = ["--hostfile", "no-hostfile", "--num_gpus", str(plan.gpus_per_node)]
    else:
        hosts = ["--hostfile", str(hostfile), "--launcher", "pdsh"]
        if plan.launch.master_addr:
            hosts += ["--master_addr", plan.launch.master_addr]
    return [program, *hosts, "--master_port", port, SCRIPT]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def _environment(plan: Plan, folder: Path) -> dict[str, str]:
    env = {**os.environ, **dict(plan.launch.env), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["HF_HUB_OFFLINE"] = "1"
    env.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # of torch, about DeepSpeed's calls
    if plan.is_cpu:
        env["DS_ACCELERATOR"] = "cpu"
    if plan.nodes > 1:
        # Names outside PYTHON*, NCCL* and a few others reach other hosts through this file only; no blank lines in it.
        file = folder / "run" / "deepspeed_env"
        names = dict(plan.launch.env) | {k: env[k] for k in ("DS_ACCELERATOR", "HF_HUB_OFFLINE") if k in env}
        file.write_text("".join(f"{k}={v}\n" for k, v in names.items()))
        env["DS_ENV_FILE"] = str(file.resolve())
    return env


def _launch(plan: Plan, folder: Path, hostfile: Path | None) -> int:
    """Streams until the launcher ends. SIGUSR1 asks the ranks to save and stop."""
    line = command(plan, _hostfile(plan, folder, hostfile))

    def ask_to_stop(*_: object) -> None:
        (folder / "run" / "stop").touch()

    previous = signal.signal(signal.SIGUSR1, ask_to_stop)
    log = folder / "run" / "launcher.log"
    process = subprocess.Popen(
        line,
        cwd=folder,
        env=_environment(plan, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        with log.open("w") as file, Progress(plan.training.steps) as progress:
            for text in process.stdout:
                file.write(text)
                file.flush()
                if PROGRESS in text:
                    progress.show(text.split(PROGRESS, 1)[1])
                elif text.strip() and not _CHATTER.match(text):
                    progress.note(text.rstrip())
        return process.wait()
    except KeyboardInterrupt:
        # The terminal's interrupt reached the launcher too: it ends its ranks. Never signal it again.
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGUSR1, previous)


def _conclude(plan: Plan, folder: Path, attempt: int, code: int) -> int:
    """The launcher's exit code alone proves nothing (it is 0 when launch.py dies by a signal): the marker does."""
    status = read_json(folder / "run" / "status.json")
    if status.get("attempt") == attempt and status.get("status") in ("done", "preempted"):
        print(f"{status['status']} at step {status['step']} of {plan.training.steps}")
        print(f"metrics      {folder / 'run' / 'metrics.jsonl'}")
        print(f"checkpoints  {folder / plan.checkpoint.directory}")
        return 0
    return report_failure(plan, folder, attempt, code)
