"""What the pages show of messages that need hosts or faults to come up: made by the code that says
them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

from shardwright.checkpoint.huggingface_export import require_trust
from shardwright.cli.terminal import print_refusal
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.run_state import report_failure
from shardwright.models.model_files import RemoteCode
from shardwright.monitor.gradient_noise_scale import NoiseScale, noise_scale_text
from shardwright.monitor.rank_events import EVENT_PREFIX, RankStack, stall_text, suspect_ranks
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.train.training_metrics import NonfiniteLossGuard
from tools.pages.page_commands import ROOT

RECIPE = ROOT / "recipes/tiny-llama-cpu.yaml"


def killed_rank(folder: Path) -> str:
    """From a launcher's output: rank 3 is gone, and signal 9 ended a rank of host b. A checkpoint
    is there."""
    plan = compile_recipe(load_recipe(RECIPE)).plan
    out = folder / "DIR"
    for name in ("run/logs/rank-00003.log", "checkpoints/step-00000500/plan.json"):
        (out / name).parent.mkdir(parents=True)
        (out / name).touch()
    lost = EVENT_PREFIX + json.dumps({"kind": "lost", "rank": 3, "host": "b", "stage": 1, "pid": 7})
    (out / "run" / "launcher.log").write_text(
        f"a: {lost}\nb: ['train.py'] exits with return code = -9\n"
    )
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert report_failure(plan, out, 1, 1) == 3
    return printed.getvalue().replace(str(out), "DIR")


def stalled_rank(folder: Path) -> str:
    """Rank 1 reads while rank 0 waits for it."""
    places = {0: ("comm.py:9 in recv", "recv"), 1: ("/data/loader.py:88 in read", None)}
    stacks = {
        r: RankStack(step=2, phase="in step 3", where=at, current_collective=w, counts={})
        for r, (at, w) in places.items()
    }
    suspects = suspect_ranks(stacks, (0, 1))
    return f"warning[SW6303]: {stall_text(stacks, suspects, {0: 'a', 1: 'b'}, 600)}\n"


def untrusted_code(folder: Path) -> str:
    """Of two empty files."""
    files = tuple(
        (name, hashlib.sha256(b"").hexdigest()) for name in ("configuration_x.py", "modeling_x.py")
    )
    code = RemoteCode(
        config_class="configuration_x.X", model_class="modeling_x.XForCausalLM", files=files
    )
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            require_trust(code, Path("step-00001000/model"), None)
        except Refusal as refusal:
            print_refusal(refusal)
    return printed.getvalue()


def lost_loss(folder: Path) -> str:
    """Ten steps in a row, from step 812."""
    divergence, said = NonfiniteLossGuard(compile_recipe(load_recipe(RECIPE)).plan), io.StringIO()
    with contextlib.redirect_stderr(said):
        for step in range(812, 822):
            try:
                said.writelines(f"{line}\n" for line in divergence.step(step, math.nan, math.nan))
            except Refusal as refusal:
                print_refusal(refusal)
    return said.getvalue()


def noise_line(folder: Path) -> str:
    """Of a run whose batch has 20 rows."""
    scale = NoiseScale(value=50.0, low=40.0, high=66.0, steps=40, rows=20, batch=20, step=4000)
    return f"{'noise':<9}{noise_scale_text(scale)}\n"


SAMPLES: dict[tuple[str, str], Callable[[Path], str]] = {
    ("docs/troubleshooting.md", "error[SW6301]"): killed_rank,
    ("docs/troubleshooting.md", "warning[SW6303]"): stalled_rank,
    ("docs/troubleshooting.md", "warning[SW6310]"): lost_loss,
    ("docs/trust.md", "error[SW2014]"): untrusted_code,
    ("docs/batch-size.md", "noise"): noise_line,
}
"""(page, first word of the block) -> its text, made in an empty folder."""

ELSEWHERE: dict[tuple[str, str], str] = {
    ("README.md", "recipe.yaml"): "a picture; its stages are those of compiler/README.md",
    ("README.md", "git"): "the demo below it runs; CI sets up a clean clone",
    ("README.md", "pip"): "tests/packaging/test_distributions.py installs the wheel",
    ("docs/troubleshooting.md", "error"): "tests/launch/test_full_disk.py fills a disk",
    ("docs/data.md", '{"messages"'): "tests/unit/data/test_images.py takes its conversations",
    ("docs/score.md", "shardwright"): "tests/launch/test_score.py scores, and docs/tour.md too",
    ("docs/score.md", "score"): "tests/launch/test_score.py reads these lines",
    ("docs/score.md", "from"): "tests/unit/data/test_score_files.py reads blocks so",
    **{
        ("docs/rules.md", word): "tests/pages/test_pages.py compares the whole page"
        for word in ("error", "warning", "note")
    },
}
"""(page, first word up to a bracket) -> what tries the block besides."""
