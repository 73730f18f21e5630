"""The pieces of `make prove`: which tests each runs, and which code its figures speak of.

`speaks_of` names what could change a figure: paths under compiler/shardwright, a folder or a file.
The tests' own modules and the installed torch, transformers and DeepSpeed count always (digest.py).
Every test marked `prove` is in exactly one piece (tests/unit/prove checks it).
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = ("hf", "ir", "model")
"""What takes a model apart and builds it again."""
DATA = ("data", "modules/batches.py")
ENGINE = (
    *MODEL,
    "engines/protocol.py",
    "engines/deepspeed",
    "layout",
    "modules",
    "partition",
    "plan",
    "records.py",
)
"""What makes losses, norms and weights, given a plan."""
CHECKPOINTS = ("checkpoint", "engines/deepspeed/live.py")
RUN = ("lease.py", "train", "watch/journal.py")
LAUNCH = ("checkpoint", "engines", "launch", "launchers", "lower", "modules", "train", "watch")
TRAITS = (
    "engines/engine.py",
    "engines/kernels.py",
    "engines/table.py",
    "engines/deepspeed/engine.py",
    "engines/deepspeed/rules.py",
    "engines/megatron",
)
"""What the cost model and the rules read of engines."""
COST = (
    "cluster",
    "cost",
    "ir",
    "layout",
    "model/popular",
    "partition",
    "rules",
    "schedule",
    "search",
    *TRAITS,
)
READ = ("diagnostics", "engines/deepspeed/schema", "lint", "recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """tests: pytest's arguments, files or file::function. areas: the benchmarks/AREA.json that it
    writes, by `proved(area, case, figures)`. hosts: wants root and the Debian packages that `make
    test-hosts` installs."""

    tests: tuple[str, ...]
    speaks_of: tuple[str, ...]
    areas: tuple[str, ...] = ()
    hosts: bool = False


_LAYOUTS = "tests/zoo/test_layouts.py"
_SIGHT = "tests/zoo/test_sight.py"

PIECES: dict[str, Piece] = {
    # Quick ones first: a broken tree is found before the long ones begin.
    "fuzz": Piece(
        tests=(
            "tests/lint/test_fuzz.py",
            "tests/migrate/test_import.py",
            "tests/unit/data/test_fuzz.py",
            "tests/unit/model/test_fuzz.py",
        ),
        speaks_of=(*READ, "data", "migrate", "model", "safe_read.py"),
        areas=("fuzz",),
    ),
    "ds-config": Piece(
        tests=("tests/cases/test_random_plans.py",),
        speaks_of=("engines/deepspeed", "ir", "layout", "lower", "plan", "rules"),
        areas=("ds-config",),
    ),
    "megatron-parity": Piece(
        tests=("tests/megatron/test_parity.py::test_every_layout",),
        speaks_of=(
            *MODEL,
            "engines/megatron",
            "engines/protocol.py",
            "layout",
            "modules",
            "partition",
            "plan",
            *DATA,
        ),
        areas=("megatron-parity",),
    ),
    "megatron-resume": Piece(
        tests=("tests/megatron/test_launch.py::test_every_pair_goes_on",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "engines/megatron"),
        areas=("megatron-resume",),
    ),
    "megatron-schedule": Piece(
        tests=("tests/schedule/test_megatron.py",),
        speaks_of=("schedule", "engines/megatron/cpu.py"),
        areas=("megatron-schedule",),
    ),
    "megatron-args": Piece(
        tests=("tests/megatron/test_arguments.py",),
        speaks_of=(
            "engines/megatron",
            "ir",
            "layout",
            "lint/megatron",
            "partition",
            "plan",
            "rules",
        ),
        areas=("megatron-args",),
    ),
    "mutations": Piece(tests=("tests/mutations/test_mutations.py",), speaks_of=("",)),
    "recipes": Piece(
        tests=("tests/recipes/test_recipes.py",),
        speaks_of=(*COST, "lower", "plan"),
        areas=("recipes",),
    ),
    "plan-speed": Piece(
        tests=("tests/recipes/test_plan_speed.py",), speaks_of=(*COST, "cli"), areas=("plan-speed",)
    ),
    "why-not": Piece(
        tests=("tests/unit/answers/test_why_not.py",), speaks_of=COST, areas=("why-not",)
    ),
    "random-runs": Piece(
        tests=("tests/random_runs/test_random_runs.py",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "engines/megatron", "engines/reference"),
        areas=("random-runs",),
    ),
    "random-layouts": Piece(tests=("tests/unit/cost/test_random.py",), speaks_of=COST),
    "published": Piece(tests=("tests/calibration/test_published.py",), speaks_of=COST),
    "this-machine": Piece(
        tests=("tests/calibration/test_this_machine.py",),
        speaks_of=(*COST, "calibrate", "engines/deepspeed", "modules", "train"),
    ),
    "shipped-graphs": Piece(tests=("tests/unit/model/test_shipped_graphs.py",), speaks_of=MODEL),
    "parity": Piece(
        tests=("tests/parity/test_prove.py::test_parity",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("parity",),
    ),
    "parity-wide": Piece(
        tests=("tests/parity/test_prove.py::test_wide_parity",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("parity-wide",),
    ),
    "chunked-parity": Piece(
        tests=("tests/parity/test_chunked.py",),
        speaks_of=(*ENGINE, *DATA),
        areas=("chunked-parity",),
    ),
    "hpz-parity": Piece(
        tests=("tests/parity/test_hpz.py",), speaks_of=(*ENGINE, *DATA), areas=("hpz-parity",)
    ),
    "lora": Piece(
        tests=("tests/parity/test_lora.py",), speaks_of=(*ENGINE, *DATA), areas=("lora",)
    ),
    "evaluation": Piece(
        tests=("tests/parity/test_evaluation.py",),
        speaks_of=(*ENGINE, *DATA, *RUN),
        areas=("evaluation",),
    ),
    "islands": Piece(
        tests=(
            "tests/launch/test_islands.py",
            "tests/launch/test_islands_faults.py",
            "tests/parity/test_islands.py",
        ),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "islands", "launch/islands.py"),
        areas=("islands",),
    ),
    "noise-scale": Piece(
        tests=("tests/parity/test_noise_scale.py",),
        speaks_of=(*ENGINE, *DATA, *RUN, "watch/noise_scale.py"),
        areas=("noise-scale",),
    ),
    "bytes": Piece(
        tests=("tests/parity/test_bytes.py",), speaks_of=(*ENGINE, *COST), areas=("bytes",)
    ),
    "compiled": Piece(tests=("tests/parity/test_compiled.py",), speaks_of=(*ENGINE, *DATA)),
    "packing-parity": Piece(tests=("tests/parity/test_packing.py",), speaks_of=(*ENGINE, *DATA)),
    "contrastive-parity": Piece(
        tests=("tests/parity/test_contrastive.py",),
        speaks_of=(*ENGINE, *DATA),
        areas=("contrastive-parity",),
    ),
    "sight-parity": Piece(
        tests=("tests/parity/test_sight.py",), speaks_of=(*ENGINE, *DATA), areas=("sight-parity",)
    ),
    "tower": Piece(tests=("tests/unit/model/test_vision.py",), speaks_of=MODEL, areas=("tower",)),
    "decoding": Piece(
        tests=("tests/unit/data/test_picture_rate.py",),
        speaks_of=(*DATA, "hf", "plan"),
        areas=("decoding",),
    ),
    "tiny-vision": Piece(
        tests=("tests/launch/test_tiny_vision.py",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("tiny-vision",),
    ),
    "resume": Piece(
        tests=("tests/parity/test_prove.py::test_resume",),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("resume",),
    ),
    "resume-matrix": Piece(
        tests=("tests/launch/test_resume_anywhere.py",),
        speaks_of=(*ENGINE, *CHECKPOINTS),
        areas=("resume-matrix",),
    ),
    "extra": Piece(
        tests=("tests/launch/test_extra.py",),
        speaks_of=(*ENGINE, *CHECKPOINTS),
        areas=("extra",),
    ),
    "roundtrip": Piece(
        tests=("tests/launch/test_roundtrip.py",),
        speaks_of=(*ENGINE, *CHECKPOINTS),
        areas=("roundtrip",),
    ),
    "crash": Piece(
        tests=("tests/launch/test_crash.py",),
        speaks_of=(*DATA, *CHECKPOINTS, *RUN),
        areas=("crash",),
    ),
    "runs": Piece(
        tests=(
            "tests/launch/test_accelerate.py",
            "tests/launch/test_data.py",
            "tests/launch/test_own_loop.py",
            "tests/launch/test_run.py",
        ),
        speaks_of=(*ENGINE, *DATA, *CHECKPOINTS, *LAUNCH),
    ),
    "autotp": Piece(
        tests=("tests/launch/test_autotp.py",),
        speaks_of=(*MODEL, "engines/deepspeed", "partition"),
        areas=("zoo-autotp",),
    ),
    "overhead": Piece(
        tests=("tests/launch/test_overhead.py",),
        speaks_of=(*ENGINE, *DATA, *RUN),
        areas=("overhead",),
    ),
    "data-cost": Piece(
        tests=("tests/launch/test_data_cost.py",), speaks_of=(*DATA, *RUN), areas=("data",)
    ),
    "pages": Piece(tests=("tests/pages/test_commands.py",), speaks_of=("cli", *READ, *LAUNCH)),
    "verify": Piece(
        tests=("tests/verify/test_verify.py",),
        speaks_of=(*ENGINE, *DATA, "verify"),
        areas=("verify",),
    ),
    "zoo-configs": Piece(
        tests=(
            "tests/zoo/test_configs.py",
            "tests/zoo/test_defaults.py",
            "tests/zoo/test_flops.py",
        ),
        speaks_of=MODEL,
    ),
    "zoo-packing": Piece(
        tests=("tests/zoo/test_packing.py", "tests/zoo/test_chunked.py"),
        speaks_of=MODEL,
        areas=("packing", "chunked"),
    ),
    "zoo-shapes": Piece(
        tests=(
            "tests/zoo/test_payload.py",
            f"{_LAYOUTS}::test_key_value_heads_are_copied_where_there_are_fewer_than_ranks",
        ),
        speaks_of=ENGINE,
    ),
    "zoo-zero": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_over_data_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-zero",),
    ),
    "zoo-pipeline": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline",),
        speaks_of=ENGINE,
        areas=("zoo-pipeline",),
    ),
    "zoo-tensor": Piece(
        tests=(f"{_LAYOUTS}::test_what_every_type_gets_of_tensor_parallelism",),
        speaks_of=ENGINE,
        areas=("zoo-tensor", "zoo-tensor-fallback"),
    ),
    "zoo-pipeline-tensor": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_tensor_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-pipeline-tensor",),
    ),
    "zoo-expert": Piece(
        tests=(f"{_LAYOUTS}::test_every_mixture_over_expert_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-expert",),
    ),
    "zoo-pipeline-expert": Piece(
        tests=(f"{_LAYOUTS}::test_every_mixture_in_a_pipeline_of_expert_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-pipeline-expert",),
    ),
    "zoo-context": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_over_context_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-context",),
    ),
    "zoo-pipeline-context": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_context_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-pipeline-context",),
    ),
    "zoo-sight": Piece(
        tests=(
            f"{_SIGHT}::test_every_type_comes_apart",
            f"{_SIGHT}::test_what_is_not_proved_is_refused",
        ),
        speaks_of=MODEL,
        areas=("zoo-sight",),
    ),
    "zoo-sight-pipeline": Piece(
        tests=(f"{_SIGHT}::test_every_type_in_a_pipeline",),
        speaks_of=ENGINE,
        areas=("zoo-sight-pipeline",),
    ),
    "zoo-sight-zero": Piece(
        tests=(f"{_SIGHT}::test_every_type_over_data_ranks",),
        speaks_of=ENGINE,
        areas=("zoo-sight-zero",),
    ),
    "faults": Piece(
        tests=("tests/faults/test_saving.py", "tests/launch/test_faults.py"),
        speaks_of=(*CHECKPOINTS, *RUN, "launch/run.py"),
        areas=("faults",),
    ),
    "schedule": Piece(tests=("tests/schedule/test_engine.py",), speaks_of=("schedule",)),
    "hosts": Piece(
        tests=("tests/launch/test_hosts.py",), speaks_of=LAUNCH, areas=("hosts",), hosts=True
    ),
    "islands-network": Piece(
        tests=("tests/launch/test_islands_network.py",),
        speaks_of=(
            *ENGINE,
            *DATA,
            *CHECKPOINTS,
            *RUN,
            "cost/islands.py",
            "islands",
            "launch/islands.py",
        ),
        areas=("islands-network",),
        hosts=True,
    ),
}

# Written by commands of their own, not by pytest.
BENCHES: dict[str, tuple[str, ...]] = {
    "batch-size": (*ENGINE, *DATA, *RUN, "watch/noise_scale.py"),
    "cost": COST,
    "gloo": ("cost/collectives.py",),
    "schedule": ("schedule", "partition"),
}
_MODULES = {
    "batch-size": "tools/bench_batch.py",
    "cost": "tools/fit_cost/bench.py",
    "gloo": "tools/bench_gloo.py",
    "schedule": "tools/bench_schedule.py",
}


def speaks_of(area: str) -> tuple[str, ...]:
    """Of benchmarks/AREA.json. Raises KeyError for one that nothing writes."""
    for piece in PIECES.values():
        if area in piece.areas:
            return piece.speaks_of
    return BENCHES[area]


def tests_of(area: str) -> tuple[str, ...]:
    """The test files behind benchmarks/AREA.json; of a bench, its module."""
    for piece in PIECES.values():
        if area in piece.areas:
            return piece.tests
    return (_MODULES[area],)
