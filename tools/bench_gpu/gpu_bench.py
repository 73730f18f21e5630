"""One layout after the other, the results written after each, so that a run that ends early is gone
on with."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.calibrate.layout_trials import WARM_UP_STEPS, launch
from shardwright.calibrate.measurement_job import versions
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.child_processes import free_port, program_path
from tools.bench_gpu.gpu_bench_cases import FAMILIES, LAYOUTS, BenchCase, digest, recipe
from tools.bench_gpu.low_precision_losses import FORMATS, losses

STEPS = 10
"""Behind the warm-up. A run tells its peak memory at its tenth step."""
CASE_SECONDS = 240
"""For one side of a case, its start included; what takes longer is given up and said."""
ATTENTION, LOSSES, KERNELS = "attention", "losses", "kernels"
ProgressCallback = Callable[[str], None]


def bench(
    file: Path,
    gpu: str,
    device: str,
    seconds: float,
    report_progress: ProgressCallback,
    only: Sequence[str] = (),
) -> list[str]:
    """What is left of `only` (or of all) when the seconds are over; no case begins that would not
    end by then. device: as torch calls it. A case that is in the file already, of this recipe on
    this machine, is left out."""
    ends, document = time.monotonic() + seconds, _read(file, gpu, device)
    due = [
        name
        for name in only or LAYOUTS
        if document["layouts"].get(name, {}).get("digest") != digest_of(name, gpu)
    ]
    longest = max((found["seconds"] for found in document["layouts"].values()), default=0.0)
    while due and time.monotonic() + longest < ends:
        name, began = due[0], time.monotonic()
        found = case(LAYOUTS[name], gpu, report_progress)
        took = round(time.monotonic() - began, 1)
        longest = max(longest, took)
        document["layouts"][name] = {"digest": digest_of(name, gpu), "seconds": took, **found}
        _write(file, document)
        report_progress(line(name, found))
        due = due[1:]
    if not due and not only:
        for family in FAMILIES:
            if family not in document[ATTENTION] and time.monotonic() < ends:
                document[ATTENTION][family] = attention(family, gpu)
                _write(file, document)
                report_progress(f"attention, {family}: {json.dumps(document[ATTENTION][family])}")
        for low_precision in FORMATS:
            if low_precision not in document[LOSSES] and time.monotonic() < ends:
                document[LOSSES][low_precision] = losses(low_precision, gpu)
                _write(file, document)
                report_progress(f"losses, {low_precision}: {document[LOSSES][low_precision]}")
        if KERNELS not in document and gpu != "cpu" and time.monotonic() < ends:
            document[KERNELS] = kernels()
            _write(file, document)
            report_progress(f"kernels: {json.dumps(document[KERNELS])}")
        due = [f"{ATTENTION} {family}" for family in FAMILIES if family not in document[ATTENTION]]
        due += [f"{LOSSES} {name}" for name in FORMATS if name not in document[LOSSES]]
    return due


def digest_of(name: str, gpu: str) -> str:
    return digest(LAYOUTS[name], gpu)


def case(layout: BenchCase, gpu: str, report_progress: ProgressCallback) -> dict[str, Any]:
    """Ours and the Trainer's, one after the other on the same device."""
    with tempfile.TemporaryDirectory(prefix="shardwright-bench-gpu-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(json.dumps(recipe(layout, gpu)), encoding="utf-8")
        try:
            compiled = compile_recipe(load_recipe(folder / "recipe.yaml"))
        except Refusal as refused:
            return {"why": f"{refused.diagnostics[0].code}: {refused.diagnostics[0].message}"}
        write_folder(folder / "out", compiled.files)
        found = _ours(compiled.plan, folder / "out")
        if not layout.alone:
            found["trainer"] = _trainer(compiled.plan, folder)
    return found


def _ours(plan: Plan, out: Path) -> dict[str, Any]:
    predicted = plan.predicted
    found: dict[str, Any] = {
        "predicted_step_seconds": predicted.time.step_seconds,
        "predicted_peak_bytes": predicted.memory.peak_bytes,
    }
    seconds, peak, why = launch(out, STEPS + WARM_UP_STEPS, CASE_SECONDS)
    if why or peak is None:
        return found | {"why": why or "the run told no peak memory"}
    step = statistics.median(seconds[WARM_UP_STEPS:])
    return found | {
        "measured_step_seconds": step,
        "measured_peak_bytes": peak,
        "tokens_per_second": _tokens(plan) / step,
        "step_error": predicted.time.step_seconds / step - 1,
        "peak_error": predicted.memory.peak_bytes / peak - 1,
    }


def _trainer(plan: Plan, folder: Path) -> dict[str, Any]:
    """The HF Trainer with DeepSpeed on accelerate/ds_config.trainer.json: the same model, batch,
    precision and ZeRO."""
    if not importlib.util.find_spec("accelerate"):
        return {"why": "accelerate is not installed"}
    out = folder / "trainer.json"
    worker = Path(__file__).with_name("hf_trainer_worker.py")
    program = Path(sys.executable).parent / "deepspeed"
    ranks = [
        "--hostfile",
        "none",
        "--num_gpus",
        "1",
        "--master_port",
        str(free_port()),
        "--no_local_rank",
    ]
    environment = {**os.environ, "PATH": program_path()}
    if plan.is_cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    command = [
        str(program),
        *ranks,
        str(worker),
        str(folder / "out"),
        str(STEPS + WARM_UP_STEPS),
        str(out),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CASE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"why": f"given up after {CASE_SECONDS} s"}
    if not out.exists():
        last = [text for text in (done.stdout + done.stderr).splitlines() if "Error" in text]
        return {"why": (last or [f"exit code {done.returncode}"])[-1][:300]}
    told = json.loads(out.read_text(encoding="utf-8"))
    step = statistics.median(told["step_seconds"][WARM_UP_STEPS:])
    return {
        "step_seconds": step,
        "tokens_per_second": _tokens(plan) / step,
        "peak_bytes": told["peak_bytes"],
    }


def attention(family: str, gpu: str) -> dict[str, Any]:
    from tools.bench_gpu.attention_parity import parity

    return parity(family, "cpu" if gpu == "cpu" else "cuda")


def kernels() -> dict[str, Any]:
    from tools.bench_gpu.kernel_rates import kernel_rates

    return kernel_rates()


def line(name: str, found: dict[str, Any]) -> str:
    if "why" in found:
        return f"{name:18} {found['why']}"
    trained = found.get("trainer", {}).get("tokens_per_second")
    faster = f"  {found['tokens_per_second'] / trained:.2f} x the Trainer" if trained else ""
    return (
        f"{name:18} {found['measured_step_seconds']:8.3f} s, predicted {found['step_error']:+6.1%}"
        f"  {found['measured_peak_bytes'] / 2**30:6.1f} GiB, predicted {found['peak_error']:+6.1%}"
        f"  {found['tokens_per_second']:9,.0f} tokens/s{faster}"
    )


def summary(file: Path) -> dict[str, float | int]:
    """Mean absolute errors over the layouts that ran, and the median of ours over the Trainer's
    tokens a second."""
    found = json.loads(file.read_text(encoding="utf-8"))["layouts"].values()
    ran = [each for each in found if "step_error" in each]
    beside = [
        each["tokens_per_second"] / each["trainer"]["tokens_per_second"]
        for each in ran
        if "tokens_per_second" in each.get("trainer", {})
    ]
    errors = ("step_error", "peak_error") if ran else ()
    means = {f"mean_{key}": statistics.mean(abs(each[key]) for each in ran) for key in errors}
    medians = {"median_over_trainer": statistics.median(beside)} if beside else {}
    return {"layouts": len(found), "ran": len(ran), **means, **medians}


def _tokens(plan: Plan) -> int:
    return plan.training.global_batch_size * plan.training.sequence_length


def _read(file: Path, gpu: str, device: str) -> dict[str, Any]:
    """The results so far; those of another machine, or of other versions, are left behind."""
    machine = {"gpu": gpu, "device": device, "versions": versions()}
    if file.exists():
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if document["machine"] == machine:
            return document
    return {
        "command": "make bench-gpu",
        "machine": machine,
        "layouts": {},
        ATTENTION: {},
        LOSSES: {},
    }


def _write(file: Path, document: dict[str, Any]) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)
