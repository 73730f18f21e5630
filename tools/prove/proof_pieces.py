"""The pieces of `make prove`: short and often-red ones first.

Every test marked `prove` is in exactly one piece (tests/tools/test_prove.py checks it).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """title: what it compares, for docs/proof.md. tests: pytest's arguments, files or
    file::function. minutes: its deadline. areas: what its tests record by `proved(area, case,
    figures)`. hosts: wants root and the Debian packages that `make test-hosts`
    installs. alone: measures seconds, so that no other piece runs at the same time."""

    title: str
    tests: tuple[str, ...]
    minutes: int
    areas: tuple[str, ...] = ()
    hosts: bool = False
    alone: bool = False


_LAYOUTS = "tests/zoo/test_layouts.py"
_VISION_LANGUAGE = "tests/zoo/test_vision_language.py"


def _zoo(area: str, title: str, test: str, minutes: int) -> Piece:
    return Piece(title=title, tests=(test,), minutes=minutes, areas=(area,))


PIECES: dict[str, Piece] = {
    "light-install": Piece(
        title="commands without torch: size, seconds",
        tests=("tests/packaging/test_light_install.py",),
        minutes=10,
        areas=("light-install",),
        alone=True,
    ),
    "speed": Piece(
        title="commands and the report within their seconds",
        tests=(
            "tests/cli/test_speed.py",
            "tests/lint/test_command.py",
            "tests/report/test_browser.py",
            "tests/unit/cli/test_prepare_command.py",
            "tests/unit/utils/test_bounded_read.py",
        ),
        minutes=10,
        alone=True,
    ),
    "damaged-files": Piece(
        title="every file of a run damaged, under every command",
        tests=("tests/cli/test_damaged_files.py",),
        minutes=15,
    ),
    "pages": Piece(
        title="the commands of the pages",
        tests=("tests/pages/test_commands.py",),
        minutes=25,
    ),
    "recipes": Piece(
        title="every recipe compiles",
        tests=("tests/recipes/test_recipes.py", "tests/unit/cli/test_init_command.py"),
        minutes=10,
        areas=("recipes",),
    ),
    "published": Piece(
        title="the planner against published runs",
        tests=(
            "tests/calibration/test_figures.py",
            "tests/calibration/test_published.py",
            "tests/calibration/test_zero3.py",
        ),
        minutes=15,
    ),
    "ds-config": Piece(
        title="DeepSpeed's parser accepts random plans",
        tests=("tests/cases/test_random_plans.py",),
        minutes=10,
        areas=("ds-config",),
    ),
    "megatron-args": Piece(
        title="Megatron-Core's parser and modules accept random plans",
        tests=("tests/megatron/test_arguments.py", "tests/megatron/test_low_precision.py"),
        minutes=10,
        areas=("megatron-args",),
    ),
    "fuzz": Piece(
        title="mutated inputs never end in a traceback",
        tests=(
            "tests/lint/test_fuzz.py",
            "tests/migrate/test_import.py",
            "tests/unit/launch/launchers/test_shell_injection.py",
            "tests/unit/data/test_fuzz.py",
            "tests/unit/data/test_hostile_templates.py",
            "tests/unit/models/test_fuzz.py",
        ),
        minutes=20,
        areas=("fuzz",),
    ),
    "random-layouts": Piece(
        title="random layouts: costs are consistent, the search finds the best",
        tests=("tests/unit/cost/test_random_layouts.py", "tests/unit/search/test_exhaustive.py"),
        minutes=10,
    ),
    "why-not": Piece(
        title="--why-not answers for random layouts",
        tests=("tests/unit/cli/test_why_not.py",),
        minutes=15,
        areas=("why-not",),
    ),
    "traces": Piece(
        title="memory and time of traced models",
        tests=(
            "tests/unit/models/test_trace.py",
            "tests/unit/parallel/test_activation_checkpointing.py",
        ),
        minutes=10,
    ),
    "shipped-graphs": Piece(
        title="shipped graphs are those that a trace gives",
        tests=("tests/unit/models/test_shipped_graphs.py",),
        minutes=15,
    ),
    "tower": Piece(
        title="FLOPs and memory of vision encoders",
        tests=("tests/unit/models/test_vision.py",),
        minutes=10,
        areas=("tower",),
    ),
    "scores": Piece(
        title="scores of a reference or a teacher",
        tests=("tests/parity/test_scores.py", "tests/launch/test_score.py"),
        minutes=15,
        areas=("scores",),
    ),
    "bytes": Piece(
        title="bytes of each collective, as planned",
        tests=("tests/parity/test_bytes.py",),
        minutes=15,
        areas=("bytes",),
    ),
    "roundtrip": Piece(
        title="Hugging Face folders in and out",
        tests=(
            "tests/launch/test_roundtrip.py",
            "tests/unit/checkpoint/test_image_generation.py",
            "tests/unit/models/test_weights_check.py",
        ),
        minutes=10,
        areas=("roundtrip",),
    ),
    "tiny-vision": Piece(
        title="a tiny vision-language model learns",
        tests=("tests/launch/test_tiny_vision.py",),
        minutes=10,
        areas=("tiny-vision",),
    ),
    "contrastive-parity": Piece(
        title="contrastive embeddings",
        tests=("tests/parity/test_contrastive.py", "tests/launch/test_contrastive.py"),
        minutes=10,
        areas=("contrastive-parity",),
    ),
    "hpz-parity": Piece(
        title="hpZ over two nodes of ranks",
        tests=("tests/parity/test_hpz.py",),
        minutes=10,
        areas=("hpz-parity",),
    ),
    "packing-parity": Piece(
        title="packed documents", tests=("tests/parity/test_packing.py",), minutes=10
    ),
    "resume": Piece(
        title="resume after losing the last checkpoint",
        tests=("tests/parity/test_prove.py::test_resume",),
        minutes=10,
        areas=("resume",),
    ),
    "runs": Piece(
        title="launches, signals, data, a training loop of one's own, Accelerate",
        tests=(
            "tests/launch/test_checkpoints.py",
            "tests/launch/test_detached.py",
            "tests/launch/test_doctor.py",
            "tests/launch/test_full_disk.py",
            "tests/launch/test_initial_weights.py",
            "tests/launch/test_launch_script.py",
            "tests/launch/test_launch_script_per_node.py",
            "tests/launch/test_accelerate.py",
            "tests/launch/test_data.py",
            "tests/launch/test_custom_training_loop.py",
            "tests/launch/test_run.py",
        ),
        minutes=30,
    ),
    "real-traces": Piece(
        title="traces of real runs name what is slow",
        tests=("tests/launch/test_trace_of_real_runs.py",),
        minutes=10,
        alone=True,
    ),
    "bench-gpu": Piece(
        title="the GPU bench, on CPU ranks",
        tests=("tests/launch/test_bench_gpu.py",),
        minutes=15,
    ),
    "autotp": Piece(
        title="DeepSpeed's AutoTP",
        tests=("tests/launch/test_autotp.py",),
        minutes=10,
        areas=("zoo-autotp",),
    ),
    "zoo-shapes": Piece(
        title="copied key/value heads, payloads of every type",
        tests=(
            "tests/zoo/test_payload.py",
            f"{_LAYOUTS}::test_key_value_heads_are_copied_where_there_are_fewer_than_ranks",
        ),
        minutes=10,
    ),
    "zoo-vlm": Piece(
        title="every vision-language type, split into layers or refused",
        tests=(
            f"{_VISION_LANGUAGE}::test_every_type_comes_apart",
            f"{_VISION_LANGUAGE}::test_what_is_not_proved_is_refused",
        ),
        minutes=10,
        areas=("zoo-vlm",),
    ),
    "zoo-packing": Piece(
        title="every causal-LM type",
        tests=("tests/zoo/test_packing.py", "tests/zoo/test_chunked.py"),
        minutes=15,
        areas=("packing", "chunked"),
    ),
    "distillation": Piece(
        title="distillation from a teacher's scores",
        tests=("tests/parity/test_distillation.py", "tests/parity/test_distillation_trl.py"),
        minutes=15,
        areas=("distillation",),
    ),
    "optimizers": Piece(
        title="Muon, Lion, Adafactor and 8-bit AdamW",
        tests=(
            "tests/parity/test_adafactor.py",
            "tests/parity/test_adamw_8bit.py",
            "tests/parity/test_half_precision_optimizers.py",
            "tests/parity/test_lion.py",
            "tests/parity/test_muon.py",
            "tests/unit/layout/test_fused_weights.py",
        ),
        minutes=15,
        areas=("optimizers",),
    ),
    "evaluation": Piece(
        title="held-out losses",
        tests=("tests/parity/test_evaluation.py",),
        minutes=15,
        areas=("evaluation",),
    ),
    "zoo-expert": _zoo(
        "zoo-expert",
        "every mixture of experts, expert 2 over data 2",
        f"{_LAYOUTS}::test_every_mixture_over_expert_ranks",
        15,
    ),
    "zoo-context": _zoo(
        "zoo-context",
        "every causal-LM type, context 2",
        f"{_LAYOUTS}::test_every_type_over_context_ranks",
        15,
    ),
    "zoo-pipeline": _zoo(
        "zoo-pipeline",
        "every causal-LM type, pipeline 2",
        f"{_LAYOUTS}::test_every_type_in_a_pipeline",
        15,
    ),
    "zoo-zero": _zoo(
        "zoo-zero",
        "every causal-LM type, data 2, ZeRO-2",
        f"{_LAYOUTS}::test_every_type_over_data_ranks",
        15,
    ),
    "zoo-tensor": Piece(
        title="every causal-LM type, tensor 2",
        tests=(f"{_LAYOUTS}::test_what_every_type_gets_of_tensor_parallelism",),
        minutes=25,
        areas=("zoo-tensor", "zoo-tensor-fallback"),
    ),
    "zoo-pipeline-expert": _zoo(
        "zoo-pipeline-expert",
        "every mixture of experts, pipeline 2 x expert 2",
        f"{_LAYOUTS}::test_every_mixture_in_a_pipeline_of_expert_ranks",
        15,
    ),
    "zoo-pipeline-context": _zoo(
        "zoo-pipeline-context",
        "every causal-LM type, pipeline 2 x context 2",
        f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_context_ranks",
        15,
    ),
    "zoo-pipeline-tensor": _zoo(
        "zoo-pipeline-tensor",
        "every causal-LM type, pipeline 2 x tensor 2",
        f"{_LAYOUTS}::test_every_type_in_a_pipeline_of_tensor_ranks",
        15,
    ),
    "zoo-vlm-pipeline": _zoo(
        "zoo-vlm-pipeline",
        "every vision-language type, pipeline 2",
        f"{_VISION_LANGUAGE}::test_every_type_in_a_pipeline",
        15,
    ),
    "zoo-vlm-zero": _zoo(
        "zoo-vlm-zero",
        "every vision-language type, data 2, ZeRO-3",
        f"{_VISION_LANGUAGE}::test_every_type_over_data_ranks",
        20,
    ),
    "zoo-configs": Piece(
        title="a tiny configuration of every type, defaults and FLOPs",
        tests=(
            "tests/zoo/test_configs.py",
            "tests/zoo/test_defaults.py",
            "tests/zoo/test_flops.py",
        ),
        minutes=15,
    ),
    "chunked-parity": Piece(
        title="the chunked loss: losses, and peak memory of a run",
        tests=("tests/parity/test_chunked.py",),
        minutes=15,
        areas=("chunked-parity",),
    ),
    "noise-scale": Piece(
        title="the gradient noise scale",
        tests=("tests/parity/test_noise_scale.py",),
        minutes=15,
        areas=("noise-scale",),
        alone=True,
    ),
    "compiled": Piece(title="torch.compile", tests=("tests/parity/test_compiled.py",), minutes=15),
    "extra": Piece(
        title="keys of a user's own ds_config",
        tests=("tests/launch/test_extra_ds_config_keys.py",),
        minutes=15,
        areas=("extra",),
    ),
    "faults": Piece(
        title="killed ranks, full disks and damaged checkpoints",
        tests=("tests/faults/test_saving.py", "tests/launch/test_faults.py"),
        minutes=20,
        areas=("faults",),
    ),
    "resume-matrix": Piece(
        title="resume on another layout, five steps",
        tests=("tests/launch/test_resume_on_other_layouts.py",),
        minutes=20,
        areas=("resume-matrix",),
    ),
    "lora": Piece(
        title="LoRA over data ranks",
        tests=("tests/parity/test_lora.py",),
        minutes=20,
        areas=("lora",),
    ),
    "vlm-parity": Piece(
        title="vision-language models, eight steps",
        tests=("tests/parity/test_vision_language.py",),
        minutes=20,
        areas=("vlm-parity",),
    ),
    "parity": Piece(
        title="layouts of Llama, GPT-2 and Qwen2, eight steps",
        tests=(
            "tests/parity/test_prove.py::test_parity",
            "tests/parity/test_low_precision.py",
            "tests/parity/test_partial.py",
        ),
        minutes=25,
        areas=("parity",),
    ),
    "parity-wide": Piece(
        title="expert ranks and context ranks, eight steps",
        tests=(
            "tests/parity/test_prove.py::test_wide_parity",
            "tests/parity/test_context.py",
            "tests/parity/test_experts.py",
            "tests/parity/test_frozen_experts.py",
            "tests/parity/test_router_aux_loss.py",
        ),
        minutes=25,
        areas=("parity-wide",),
    ),
    "megatron-parity": Piece(
        title="Megatron-Core's layouts",
        tests=("tests/megatron/test_parity.py::test_every_layout",),
        minutes=25,
        areas=("megatron-parity",),
    ),
    "megatron-schedule": Piece(
        title="Megatron-Core's interleaved schedule, as simulated",
        tests=("tests/schedule/test_megatron.py",),
        minutes=10,
        areas=("megatron-schedule",),
        alone=True,
    ),
    "preference": Piece(
        title="preference objectives and reward models",
        tests=(
            "tests/parity/test_preference.py",
            "tests/parity/test_preference_trl.py",
            "tests/launch/test_tiny_expert_and_context_recipes.py",
        ),
        minutes=30,
        areas=("preference",),
    ),
    "islands": Piece(
        title="several islands, compared with one process",
        tests=(
            "tests/launch/test_islands.py",
            "tests/launch/test_islands_faults.py",
            "tests/launch/test_resume_other_islands.py",
            "tests/parity/test_islands.py",
            "tests/unit/diloco/test_outer_store.py",
            "tests/unit/train/test_outer_step.py",
        ),
        minutes=30,
        areas=("islands",),
    ),
    "verify": Piece(
        title="`verify` passes what is right and finds planted faults",
        tests=("tests/verify/test_verify.py",),
        minutes=35,
        areas=("verify",),
    ),
    "recovery": Piece(
        title="30 random faults in one run, compared with an uninterrupted one",
        tests=("tests/launch/test_supervised.py", "tests/launch/test_memory_copies.py"),
        minutes=20,
        areas=("recovery",),
    ),
    "recovery-jobset": Piece(
        title="recovery in JobSet's pods, plans for fewer nodes",
        tests=(
            "tests/launch/test_jobset_pods.py",
            "tests/unit/supervise/test_fewer_nodes.py",
            "tests/unit/supervise/test_jobset_pods.py",
        ),
        minutes=10,
    ),
    "ray": Piece(
        title="Ray's workers",
        tests=("tests/launch/test_ray.py", "tests/unit/launch/launchers/test_ray.py"),
        minutes=10,
    ),
    "megatron-resume": Piece(
        title="resume under Megatron-Core, also from and into DeepSpeed",
        tests=("tests/megatron/test_launch.py",),
        minutes=40,
        areas=("megatron-resume",),
    ),
    "random-runs": Piece(
        title="random recipes, compared with a plain loop, four steps and a resume",
        tests=("tests/random_runs/test_random_runs.py",),
        minutes=60,
        areas=("random-runs",),
    ),
    "crash": Piece(
        title="50 kills at random moments",
        tests=("tests/launch/test_crash.py",),
        minutes=60,
        areas=("crash",),
    ),
    "hosts": Piece(
        title="20 killed ranks on several hosts",
        tests=("tests/launch/test_hosts.py",),
        minutes=30,
        areas=("hosts",),
        hosts=True,
    ),
    "recovery-hosts": Piece(
        title="a lost host, planned again for those that are left",
        tests=(
            "tests/launch/test_supervised_hosts.py::test_a_layout_is_planned_again_for_one_node",
        ),
        minutes=45,
        areas=("recovery-hosts",),
        hosts=True,
    ),
    "decoding": Piece(
        title="images decoded a second",
        tests=("tests/unit/data/test_image_rate.py",),
        minutes=10,
        areas=("decoding",),
        alone=True,
    ),
    "data-cost": Piece(
        title="seconds of reading data",
        tests=("tests/launch/test_data_cost.py",),
        minutes=10,
        areas=("data",),
        alone=True,
    ),
    "overhead": Piece(
        title="a step beside a hand-written DeepSpeed script",
        tests=("tests/launch/test_overhead.py",),
        minutes=15,
        areas=("overhead",),
        alone=True,
    ),
    "preference-cost": Piece(
        title="seconds of preference objectives, as predicted",
        tests=("tests/launch/test_preference_cost.py",),
        minutes=20,
        areas=("preference-cost",),
        alone=True,
    ),
    "islands-network": Piece(
        title="outer steps over a slow link",
        tests=("tests/launch/test_islands_network.py",),
        minutes=30,
        areas=("islands-network",),
        hosts=True,
        alone=True,
    ),
    "schedule": Piece(
        title="DeepSpeed's pipeline schedules, as simulated",
        tests=("tests/schedule/test_engine.py",),
        minutes=20,
        alone=True,
    ),
    "this-machine": Piece(
        title="the planner against runs on this machine",
        tests=("tests/calibration/test_this_machine.py",),
        minutes=30,
        alone=True,
    ),
    "plan-speed": Piece(
        title="`plan` of every shipped model on every GPU",
        tests=("tests/recipes/test_plan_speed.py",),
        minutes=60,
        areas=("plan-speed",),
        alone=True,
    ),
}

BENCHES = ("batch-size", "cost", "gloo", "gpu", "schedule")
"""benchmarks/AREA.json that commands of their own write (tools/bench_*, tools/fit_cost)."""

FIGURES = frozenset(
    {
        *BENCHES,
        "data",
        "decoding",
        "islands-network",
        "light-install",
        "overhead",
        "plan-speed",
        "preference-cost",
    }
)
"""What is kept in benchmarks/AREA.json. Every other area is an equality: a run says yes or no."""

_ZOO = tuple(name for name in PIECES if name.startswith("zoo-"))
_PLANNER = ("recipes", "published", "random-layouts", "why-not", "plan-speed", "light-install")
_TRAINING = ("parity", "parity-wide", "random-runs", "verify", "resume", "bytes")
_RESUME = ("resume", "resume-matrix", "roundtrip", "faults", "crash", "recovery")
_MEGATRON = ("megatron-args", "megatron-parity", "megatron-resume", "megatron-schedule")

LOOKS_AT: dict[str, tuple[str, ...]] = {
    # Packages of shardwright.
    "calibrate": ("this-machine", "real-traces", "bench-gpu"),
    "checkpoint": (*_RESUME, "megatron-resume", "damaged-files", "hosts"),
    "cli": ("speed", "light-install", "damaged-files", "pages", "why-not"),
    "compile": ("recipes", "ds-config", "megatron-args", "random-runs"),
    "cost": (*_PLANNER, "this-machine", "preference-cost", "bytes", "traces"),
    "data": (
        "fuzz",
        "runs",
        "packing-parity",
        "random-runs",
        "evaluation",
        "decoding",
        "data-cost",
    ),
    "diagnostics": ("fuzz", "damaged-files", "pages"),
    "diloco": ("islands", "islands-network"),
    "engines": (*_TRAINING, *_MEGATRON, "ds-config", "extra", "optimizers", "autotp", "schedule"),
    "launch": ("runs", "hosts", "ray", "pages", "recovery-hosts"),
    "layout": (*_TRAINING, "recipes", "ds-config", "schedule", "megatron-schedule"),
    "lint": ("fuzz", "pages", "speed"),
    "migrate": ("fuzz", "pages"),
    "models": (*_ZOO, "traces", "shipped-graphs", "tower", "roundtrip", "vlm-parity"),
    "monitor": ("runs", "crash", "recovery", "hosts", "noise-scale"),
    "parallel": (*_TRAINING, *_ZOO, "hpz-parity", "packing-parity", "chunked-parity", "compiled"),
    "plan": (*_TRAINING, "ds-config", "damaged-files"),
    "recipe": ("fuzz", "recipes", "random-runs"),
    "report": ("light-install", "pages"),
    "search": _PLANNER,
    "supervise": ("recovery", "recovery-jobset", "recovery-hosts", "ray"),
    "trace": ("real-traces", "pages", "damaged-files"),
    "train": ("runs", "crash", "recovery", "random-runs", "evaluation", "overhead"),
    "utils": ("fuzz", "damaged-files", "runs"),
    "verify": ("verify",),
    # Features.
    "context": ("zoo-context", "zoo-pipeline-context", "parity-wide", "bytes", "packing-parity"),
    "contrastive": ("contrastive-parity",),
    "distillation": ("distillation", "scores", "preference-cost"),
    "expert": ("zoo-expert", "zoo-pipeline-expert", "parity-wide", "bytes", "verify"),
    "hpz": ("hpz-parity",),
    "islands": ("islands", "islands-network"),
    "lora": ("lora", "vlm-parity", "verify"),
    "low-precision": ("parity", "megatron-args", "verify", "bench-gpu"),
    "megatron": _MEGATRON,
    "noise-scale": ("noise-scale",),
    "optimizers": ("optimizers", "random-runs"),
    "packing": ("packing-parity", "zoo-packing", "parity-wide"),
    "pipeline": ("parity", "zoo-pipeline", "schedule", "megatron-schedule"),
    "preference": ("preference", "scores", "preference-cost"),
    "score": ("scores", "distillation", "preference"),
    "tensor": ("parity", "zoo-tensor", "zoo-pipeline-tensor", "zoo-shapes", "autotp"),
    "vision": ("vlm-parity", "zoo-vlm", "zoo-vlm-pipeline", "zoo-vlm-zero", "tower", "tiny-vision"),
}
"""Package or feature -> the pieces that look at it, coarsely, by hand: `make prove FOR=lora`."""
