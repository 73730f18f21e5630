"""The pieces of `make prove`: which tests each runs, and which code its figures speak of.

`source_paths` names what could change a figure: paths under compiler/shardwright, a folder or a
file. The tests' own modules and the installed torch, transformers and DeepSpeed count always
(digest.py). Every test marked `prove` is in exactly one piece (tests/tools/test_prove.py
checks it).
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL = ("models", "recipe/recipe_types.py", "recipe/literal_types.py")
"""What takes a model apart and builds it again."""
DATA = ("data", "parallel/micro_batches.py")
ENGINE = (
    *MODEL,
    "engines/trainer_protocol.py",
    "engines/deepspeed",
    "layout",
    "parallel",
    "plan",
    "utils/json_values.py",
)
"""What makes losses, norms and weights, given a plan."""
CHECKPOINTS = ("checkpoint", "engines/deepspeed/deepspeed_optimizer_shards.py")
RUN = ("utils/run_lease.py", "train", "monitor/run_files.py")
LAUNCH = (
    "checkpoint",
    "engines",
    "launch",
    "compile/compiled_folder.py",
    "parallel",
    "train",
    "monitor",
)
TRAITS = (
    "engines/engine_definition.py",
    "engines/run_profiles.py",
    "engines/assumed_runs.json",
    "engines/engine_table.py",
    "engines/deepspeed/deepspeed_capabilities.py",
    "engines/megatron",
)
"""What the cost model and the rules read of engines."""
COST = (
    "cost",
    "models/model_graph.py",
    "layout",
    "models/popular",
    "search",
    *TRAITS,
)
READ = (
    "diagnostics",
    "engines/deepspeed/ds_config_schema.py",
    "engines/deepspeed/ds_config_schemas",
    "lint",
    "recipe",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """tests: pytest's arguments, files or file::function. areas: the benchmarks/AREA.json that it
    writes, by `proved(area, case, figures)`. hosts: wants root and the Debian packages that `make
    test-hosts` installs."""

    tests: tuple[str, ...]
    source_paths: tuple[str, ...]
    areas: tuple[str, ...] = ()
    hosts: bool = False


_LAYOUTS = "tests/zoo/test_layouts.py"
_VISION_LANGUAGE = "tests/zoo/test_vision_language.py"

PIECES: dict[str, Piece] = {
    # Quick ones first: a broken tree is found before the long ones begin.
    "fuzz": Piece(
        tests=(
            "tests/lint/test_fuzz.py",
            "tests/migrate/test_import.py",
            "tests/unit/data/test_fuzz.py",
            "tests/unit/models/test_fuzz.py",
        ),
        source_paths=(*READ, "data", "migrate", "models", "utils/file_io.py"),
        areas=("fuzz",),
    ),
    "damaged-files": Piece(
        tests=("tests/cli/test_damaged_files.py",),
        source_paths=(
            *("checkpoint", "cli", "compile", "diagnostics", "diloco", "launch", "monitor", "plan"),
            *("recipe", "report", "train", "utils"),
        ),
    ),
    "ds-config": Piece(
        tests=("tests/cases/test_random_plans.py",),
        source_paths=(
            "engines/deepspeed",
            "models/model_graph.py",
            "layout",
            "compile/compiled_folder.py",
            "plan",
            "search",
        ),
        areas=("ds-config",),
    ),
    "megatron-parity": Piece(
        tests=("tests/megatron/test_parity.py::test_every_layout",),
        source_paths=(
            *MODEL,
            "engines/megatron",
            "engines/trainer_protocol.py",
            "layout",
            "parallel",
            "plan",
            *DATA,
        ),
        areas=("megatron-parity",),
    ),
    "megatron-resume": Piece(
        tests=(
            "tests/megatron/test_launch.py::test_every_pair_goes_on",
            "tests/megatron/test_launch.py::test_states_move_everywhere",
        ),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "engines/megatron"),
        areas=("megatron-resume",),
    ),
    "megatron-schedule": Piece(
        tests=("tests/schedule/test_megatron.py",),
        source_paths=("layout", "engines/megatron/megatron_cpu_patches.py"),
        areas=("megatron-schedule",),
    ),
    "megatron-args": Piece(
        tests=("tests/megatron/test_arguments.py", "tests/megatron/test_low_precision.py"),
        source_paths=(
            "engines/megatron",
            "models/model_graph.py",
            "layout",
            "lint",
            "plan",
            "search",
        ),
        areas=("megatron-args",),
    ),
    "mutations": Piece(tests=("tests/mutations/test_mutations.py",), source_paths=("",)),
    "recipes": Piece(
        tests=("tests/recipes/test_recipes.py",),
        source_paths=(*COST, "compile/compiled_folder.py", "plan"),
        areas=("recipes",),
    ),
    "plan-speed": Piece(
        tests=("tests/recipes/test_plan_speed.py",),
        source_paths=(*COST, "cli"),
        areas=("plan-speed",),
    ),
    "light-install": Piece(
        tests=("tests/packaging/test_light_install.py",),
        source_paths=(*COST, "cli", "report", "utils/installation.py"),
        areas=("light-install",),
    ),
    "why-not": Piece(
        tests=("tests/unit/cli/test_why_not.py",), source_paths=COST, areas=("why-not",)
    ),
    "random-runs": Piece(
        tests=("tests/random_runs/test_random_runs.py",),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "engines/megatron", "engines/reference"),
        areas=("random-runs",),
    ),
    "random-layouts": Piece(tests=("tests/unit/cost/test_random_layouts.py",), source_paths=COST),
    "published": Piece(
        tests=("tests/calibration/test_figures.py", "tests/calibration/test_published.py"),
        source_paths=COST,
    ),
    "this-machine": Piece(
        tests=("tests/calibration/test_this_machine.py",),
        source_paths=(*COST, "calibrate", "engines/deepspeed", "parallel", "train"),
    ),
    "shipped-graphs": Piece(
        tests=("tests/unit/models/test_shipped_graphs.py",), source_paths=MODEL
    ),
    "traces": Piece(tests=("tests/unit/models/test_trace.py",), source_paths=MODEL),
    "parity": Piece(
        tests=("tests/parity/test_prove.py::test_parity",),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("parity",),
    ),
    "parity-wide": Piece(
        tests=("tests/parity/test_prove.py::test_wide_parity",),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("parity-wide",),
    ),
    "optimizers": Piece(
        tests=(
            "tests/parity/test_adafactor.py",
            "tests/parity/test_adamw_8bit.py",
            "tests/parity/test_half_precision_optimizers.py",
            "tests/parity/test_lion.py",
            "tests/parity/test_muon.py",
        ),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("optimizers",),
    ),
    "preference": Piece(
        tests=(
            "tests/parity/test_preference.py",
            "tests/parity/test_preference_trl.py",
            "tests/launch/test_tiny_expert_and_context_recipes.py",
        ),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("preference",),
    ),
    "preference-cost": Piece(
        tests=("tests/launch/test_preference_cost.py",),
        source_paths=(*ENGINE, *DATA, *RUN),
        areas=("preference-cost",),
    ),
    "distillation": Piece(
        tests=("tests/parity/test_distillation.py", "tests/parity/test_distillation_trl.py"),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("distillation",),
    ),
    "scores": Piece(
        tests=("tests/parity/test_scores.py", "tests/launch/test_score.py"),
        source_paths=(*ENGINE, *DATA, *RUN, "compile/forward_only_recipe.py"),
        areas=("scores",),
    ),
    "chunked-parity": Piece(
        tests=("tests/parity/test_chunked.py",),
        source_paths=(*ENGINE, *DATA),
        areas=("chunked-parity",),
    ),
    "hpz-parity": Piece(
        tests=("tests/parity/test_hpz.py",), source_paths=(*ENGINE, *DATA), areas=("hpz-parity",)
    ),
    "lora": Piece(
        tests=("tests/parity/test_lora.py",), source_paths=(*ENGINE, *DATA), areas=("lora",)
    ),
    "evaluation": Piece(
        tests=("tests/parity/test_evaluation.py",),
        source_paths=(*ENGINE, *DATA, *RUN),
        areas=("evaluation",),
    ),
    "islands": Piece(
        tests=(
            "tests/launch/test_islands.py",
            "tests/launch/test_islands_faults.py",
            "tests/parity/test_islands.py",
        ),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN, "diloco"),
        areas=("islands",),
    ),
    "noise-scale": Piece(
        tests=("tests/parity/test_noise_scale.py",),
        source_paths=(*ENGINE, *DATA, *RUN, "monitor/gradient_noise_scale.py"),
        areas=("noise-scale",),
    ),
    "bytes": Piece(
        tests=("tests/parity/test_bytes.py",), source_paths=(*ENGINE, *COST), areas=("bytes",)
    ),
    "compiled": Piece(tests=("tests/parity/test_compiled.py",), source_paths=(*ENGINE, *DATA)),
    "packing-parity": Piece(tests=("tests/parity/test_packing.py",), source_paths=(*ENGINE, *DATA)),
    "contrastive-parity": Piece(
        tests=("tests/parity/test_contrastive.py",),
        source_paths=(*ENGINE, *DATA),
        areas=("contrastive-parity",),
    ),
    "vlm-parity": Piece(
        tests=("tests/parity/test_vision_language.py",),
        source_paths=(*ENGINE, *DATA),
        areas=("vlm-parity",),
    ),
    "tower": Piece(
        tests=("tests/unit/models/test_vision.py",), source_paths=MODEL, areas=("tower",)
    ),
    "decoding": Piece(
        tests=("tests/unit/data/test_image_rate.py",),
        source_paths=(*DATA, "models", "plan"),
        areas=("decoding",),
    ),
    "tiny-vision": Piece(
        tests=("tests/launch/test_tiny_vision.py",),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("tiny-vision",),
    ),
    "resume": Piece(
        tests=("tests/parity/test_prove.py::test_resume",),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *RUN),
        areas=("resume",),
    ),
    "resume-matrix": Piece(
        tests=("tests/launch/test_resume_on_other_layouts.py",),
        source_paths=(*ENGINE, *CHECKPOINTS),
        areas=("resume-matrix",),
    ),
    "extra": Piece(
        tests=("tests/launch/test_extra_ds_config_keys.py",),
        source_paths=(*ENGINE, *CHECKPOINTS),
        areas=("extra",),
    ),
    "roundtrip": Piece(
        tests=("tests/launch/test_roundtrip.py",),
        source_paths=(*ENGINE, *CHECKPOINTS),
        areas=("roundtrip",),
    ),
    "crash": Piece(
        tests=("tests/launch/test_crash.py",),
        source_paths=(*DATA, *CHECKPOINTS, *RUN),
        areas=("crash",),
    ),
    "runs": Piece(
        tests=(
            "tests/launch/test_accelerate.py",
            "tests/launch/test_data.py",
            "tests/launch/test_custom_training_loop.py",
            "tests/launch/test_run.py",
        ),
        source_paths=(*ENGINE, *DATA, *CHECKPOINTS, *LAUNCH),
    ),
    "autotp": Piece(
        tests=("tests/launch/test_autotp.py",),
        source_paths=(*MODEL, "engines/deepspeed", "layout"),
        areas=("zoo-autotp",),
    ),
    "overhead": Piece(
        tests=("tests/launch/test_overhead.py",),
        source_paths=(*ENGINE, *DATA, *RUN),
        areas=("overhead",),
    ),
    "data-cost": Piece(
        tests=("tests/launch/test_data_cost.py",), source_paths=(*DATA, *RUN), areas=("data",)
    ),
    "pages": Piece(tests=("tests/pages/test_commands.py",), source_paths=("cli", *READ, *LAUNCH)),
    "verify": Piece(
        tests=("tests/verify/test_verify.py",),
        source_paths=(*ENGINE, *DATA, "verify"),
        areas=("verify",),
    ),
    "zoo-configs": Piece(
        tests=(
            "tests/zoo/test_configs.py",
            "tests/zoo/test_defaults.py",
            "tests/zoo/test_flops.py",
        ),
        source_paths=MODEL,
    ),
    "zoo-packing": Piece(
        tests=("tests/zoo/test_packing.py", "tests/zoo/test_chunked.py"),
        source_paths=MODEL,
        areas=("packing", "chunked"),
    ),
    "zoo-shapes": Piece(
        tests=(
            "tests/zoo/test_payload.py",
            f"{_LAYOUTS}::test_key_value_heads_are_copied_where_there_are_fewer_than_ranks",
        ),
        source_paths=ENGINE,
    ),
    "zoo-zero": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_over_data_ranks",),
        source_paths=ENGINE,
        areas=("zoo-zero",),
    ),
    "zoo-pipeline": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline",),
        source_paths=ENGINE,
        areas=("zoo-pipeline",),
    ),
    "zoo-tensor": Piece(
        tests=(f"{_LAYOUTS}::test_what_every_type_gets_of_tensor_parallelism",),
        source_paths=ENGINE,
        areas=("zoo-tensor", "zoo-tensor-fallback"),
    ),
    "zoo-pipeline-tensor": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_tensor_ranks",),
        source_paths=ENGINE,
        areas=("zoo-pipeline-tensor",),
    ),
    "zoo-expert": Piece(
        tests=(f"{_LAYOUTS}::test_every_mixture_over_expert_ranks",),
        source_paths=ENGINE,
        areas=("zoo-expert",),
    ),
    "zoo-pipeline-expert": Piece(
        tests=(f"{_LAYOUTS}::test_every_mixture_in_a_pipeline_of_expert_ranks",),
        source_paths=ENGINE,
        areas=("zoo-pipeline-expert",),
    ),
    "zoo-context": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_over_context_ranks",),
        source_paths=ENGINE,
        areas=("zoo-context",),
    ),
    "zoo-pipeline-context": Piece(
        tests=(f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_context_ranks",),
        source_paths=ENGINE,
        areas=("zoo-pipeline-context",),
    ),
    "zoo-vlm": Piece(
        tests=(
            f"{_VISION_LANGUAGE}::test_every_type_comes_apart",
            f"{_VISION_LANGUAGE}::test_what_is_not_proved_is_refused",
        ),
        source_paths=MODEL,
        areas=("zoo-vlm",),
    ),
    "zoo-vlm-pipeline": Piece(
        tests=(f"{_VISION_LANGUAGE}::test_every_type_in_a_pipeline",),
        source_paths=ENGINE,
        areas=("zoo-vlm-pipeline",),
    ),
    "zoo-vlm-zero": Piece(
        tests=(f"{_VISION_LANGUAGE}::test_every_type_over_data_ranks",),
        source_paths=ENGINE,
        areas=("zoo-vlm-zero",),
    ),
    "faults": Piece(
        tests=("tests/faults/test_saving.py", "tests/launch/test_faults.py"),
        source_paths=(*CHECKPOINTS, *RUN, "launch/launcher_process.py"),
        areas=("faults",),
    ),
    "recovery": Piece(
        tests=("tests/launch/test_supervised.py", "tests/launch/test_memory_copies.py"),
        source_paths=(*CHECKPOINTS, *RUN, "launch/launcher_process.py", "supervise"),
        areas=("recovery",),
    ),
    "recovery-hosts": Piece(
        tests=(
            "tests/launch/test_supervised_hosts.py::test_a_layout_is_planned_again_for_one_node",
        ),
        source_paths=(*CHECKPOINTS, *RUN, "launch/launcher_process.py", "supervise"),
        areas=("recovery-hosts",),
        hosts=True,
    ),
    "recovery-jobset": Piece(
        tests=("tests/launch/test_jobset_pods.py",),
        source_paths=(*CHECKPOINTS, *RUN, "supervise"),
    ),
    "ray": Piece(
        tests=("tests/launch/test_ray.py",),
        source_paths=(*CHECKPOINTS, *RUN, "launch/launchers"),
    ),
    "schedule": Piece(tests=("tests/schedule/test_engine.py",), source_paths=("layout",)),
    "hosts": Piece(
        tests=("tests/launch/test_hosts.py",), source_paths=LAUNCH, areas=("hosts",), hosts=True
    ),
    "islands-network": Piece(
        tests=("tests/launch/test_islands_network.py",),
        source_paths=(
            *ENGINE,
            *DATA,
            *CHECKPOINTS,
            *RUN,
            "cost/diloco_costs.py",
            "diloco",
        ),
        areas=("islands-network",),
        hosts=True,
    ),
}

# Written by commands of their own, not by pytest.
BENCHES: dict[str, tuple[str, ...]] = {
    "batch-size": (*ENGINE, *DATA, *RUN, "monitor/gradient_noise_scale.py"),
    "cost": COST,
    "gloo": ("cost/collective_seconds.py",),
    "gpu": COST,
    "schedule": ("layout",),
}
_MODULES = {
    "batch-size": "tools/bench_batch_size.py",
    "cost": "tools/fit_cost/bench_cost.py",
    "gloo": "tools/bench_gloo.py",
    "gpu": "tools/bench_gpu/gpu_bench.py",
    "schedule": "tools/bench_pipeline_schedule.py",
}


def source_paths(area: str) -> tuple[str, ...]:
    """Of benchmarks/AREA.json. Raises KeyError for one that nothing writes."""
    for piece in PIECES.values():
        if area in piece.areas:
            return piece.source_paths
    return BENCHES[area]


def tests_of(area: str) -> tuple[str, ...]:
    """The test files behind benchmarks/AREA.json; of a bench, its module."""
    for piece in PIECES.values():
        if area in piece.areas:
            return piece.tests
    return (_MODULES[area],)
