"""docs/rules.md: the rules about layouts, from the registry, each with what it says where it is
broken."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from shardwright.diagnostics import Diagnostic
from shardwright.diagnostics.code_registry import CODES
from shardwright.engines.engine_table import ENGINES
from shardwright.engines.megatron.megatron_capabilities import (
    MEGATRON,
    REFUSED_KEYS,
    SUPPORTED_KEYS,
)
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Candidate, Layout, Rule
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.objectives import ObjectiveSection
from shardwright.recipe.recipe_types import (
    DataSection,
    LoraSection,
    NoiseScaleSection,
    Recipe,
    with_resolved_kernels,
)
from shardwright.search.rule_registry import GENERAL_RULES, rules_for
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import model_section, recipe_of

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "openai-community/gpt2",
    "mistralai/Mixtral-8x7B-v0.1",
    "bigscience/bloom-560m",
)
MAMBA: dict[str, JsonValue] = {
    "model_type": "mamba",
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "vocab_size": 50280,
}
PLAIN = Layout(
    tensor=1,
    pipeline=1,
    data=16,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=4,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    *({"tensor": t, "data": 16 // t if 16 % t == 0 else 1} for t in (3, 5, 8, 16)),
    *({"pipeline": 4, "data": 4, "zero_stage": z} for z in (0, 1, 3)),
    {"zero_stage": 0},
    {"zero_stage": 3},
    {"pipeline": 64, "data": 1},
    {"pipeline": 4, "data": 4, "schedule": "dualpipev"},
    {"schedule": "dualpipev"},
    {"micro_batch_size": 3},
    {"expert": 2},
    {"expert": 3},
    {"expert": 16},
    {"expert": 2, "zero_stage": 0},
    {"virtual_stages": 2},
    {"pipeline": 4, "data": 4, "activation_checkpointing": PartialCheckpointing(full=32)},
    {"activation_checkpointing": ("mlp", "moe")},
    {"zero_stage": 1, "offload": "parameters"},
    {"zero_stage": 3, "offload": "parameters"},
    {"context": 2, "data": 8},
    {"context": 3, "data": 5},
    {"sequence_parallel": True},
    {"virtual_stages": 2},
    {"expert_overlap": True},
    {"expert": 2, "expert_dispatcher": "deepep"},
    {"expert": 3, "expert_dispatcher": "deepep"},
    {"expert": 2, "expert_overlap": True, "pipeline": 4, "data": 4},
    {"data": 1, "micro_batch_size": 64, "gradient_accumulation_steps": 1},
    {"zero_stage": 0, "offload": "optimizer"},
)
NOISE = NoiseScaleSection(every_steps=50, rows=32)
TEXT = DataSection(kind="text", path="corpus/*.txt", tokenizer="byte", packing=True, shuffle=True)


def page() -> str:
    lines = [
        "# The rules about layouts",
        "",
        "<!-- made by `make generated` from compiler/shardwright/search/rule_registry.py -->",
        "",
        "`plan` omits layouts that break a rule with severity error; warnings reject nothing. "
        "`estimate` prints the code and prices such a layout all the same. It cannot do so if the "
        "degrees do not multiply to the number of GPUs (SW3101), or the batch does not divide "
        "(SW3102). `estimate --json` then has no `strategy`, `memory` and `time`. `shardwright "
        "explain R --why-not tensor=8,pipeline=2` names the rule that rejects a layout.",
        "",
        "Each entry below is one rule: its code, title and severity, the reason, the keys of the "
        "layout that it reads, and an example of its message.",
    ]
    ours = {
        code: rule for code, rule in rules_for("deepspeed").items() if code not in GENERAL_RULES
    }
    groups = (
        ("For every engine", GENERAL_RULES),
        ("For DeepSpeed (`target: deepspeed`)", ours),
        ("For plain PyTorch (`target: reference`)", ENGINES["reference"].rules),
        ("For Megatron-Core (`target: megatron`)", ENGINES["megatron"].rules),
    )
    for title, rules in groups:
        lines += ["", f"## {title}"]
        for code in sorted(rules):
            lines += _rule(code, rules[code])
    lines += _megatron_keys()
    lines += [
        "",
        "## Memory and the search",
        "",
        "| code | problem |",
        "|---|---|",
        *(f"| {code} | {title} |" for code, title in CODES.items() if code.startswith("SW32")),
    ]
    return "\n".join(lines) + "\n"


def _megatron_keys() -> list[str]:
    """The table of every key under `target: megatron` that no rule about layouts decides."""
    refused = [
        (
            f"| `{name}` | "
            f"{', '.join(f'`{v}`' for v in key.allowed if v is not None) or 'left out'} | SW1922: "
            f"{key.why} |"
        )
        for name, key in REFUSED_KEYS.items()
    ]
    for name, values in MEGATRON.trained_values().items():
        why = MEGATRON.refusal_reasons.get(name, "no other one is implemented")
        shown = ", ".join(f"`{v}`" for v in values)
        refused.append(f"| `{name}` | {shown} | {MEGATRON.refusal_code}: {why} |")
    return [
        "",
        "### Keys of a recipe under `target: megatron`",
        "",
        "Supported: "
        + ", ".join(f"`{name}`" for name in SUPPORTED_KEYS)
        + ". The other keys support only some values:",
        "",
        "| key | supported values | error for other values |",
        "|---|---|---|",
        *refused,
    ]


def _rule(code: str, rule: Rule) -> list[str]:
    found = examples().get(code)
    severity = "" if found is None else f" ({found.severity})"
    lines = ["", f"### {code}: {CODES[code]}{severity}", ""]
    reads = (
        ", ".join(f"`{name}`" for name in sorted(rule.reads))
        or "none, only other keys of the recipe"
    )
    doc = " ".join((inspect.getdoc(rule.check) or "").split())
    lines += [f"{doc}\n"] if doc else []
    lines += [f"Keys of the layout that decide it: {reads}."]
    if found is not None:
        lines += [
            "",
            "```text",
            f"{found.severity}[{code}]: {found.message}",
            f"  = help: {found.help}",
            "```",
        ]
    return lines


@functools.cache
def examples() -> dict[str, Diagnostic]:
    """What each rule says of the first of these layouts that breaks it."""
    found: dict[str, Diagnostic] = {}
    for subject in subjects():
        for code, rule in {
            **rules_for("deepspeed"),
            **rules_for("reference"),
            **rules_for("megatron"),
        }.items():
            if code not in found and (diagnostic := rule.check(subject)) is not None:
                found[code] = diagnostic
    return found


def subjects() -> Iterator[Candidate]:
    sections = (*(model_section(source=source) for source in MODELS), model_section(config=MAMBA))
    for section, recipe, change in itertools.product(sections, recipes(), CHANGES):
        strategy = dataclasses.replace(PLAIN, **change)
        pins = dataclasses.replace(recipe.parallelism, expert=strategy.expert)
        graph, pinned = build_model_graph(section), recipe.model.attention
        yield Candidate(
            recipe=dataclasses.replace(recipe, parallelism=pins),
            graph=graph if pinned == "auto" else dataclasses.replace(graph, attention=pinned),
            cluster=resolve_cluster(recipe.cluster),
            strategy=strategy,
        )


def recipes() -> tuple[Recipe, ...]:
    cluster = {"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"}
    training = {"sequence_length": 1024, "global_batch_size": 64}
    plain = recipe_of(cluster=cluster, training=training)
    single = recipe_of(cluster=cluster, training={**training, "precision": "fp32"})
    half = recipe_of(cluster={**cluster, "gpu": "cpu"}, training={**training, "precision": "fp16"})
    return (
        plain,
        dataclasses.replace(plain, cluster=dataclasses.replace(plain.cluster, islands=2)),
        dataclasses.replace(
            single, model=dataclasses.replace(single.model, attention="flash_attention_2")
        ),
        with_resolved_kernels(plain, "compile"),
        dataclasses.replace(plain, data=TEXT),
        dataclasses.replace(
            plain, lora=LoraSection(rank=8, alpha=16.0, dropout=0.0, target_modules=("c_attn",))
        ),
        *(
            dataclasses.replace(
                plain,
                model=dataclasses.replace(plain.model, freeze=(entry,)),
                lora=LoraSection(rank=8, alpha=16.0, dropout=0.0, target_modules=None)
                if adapted
                else None,
            )
            for entry, adapted in (("vision", False), ("*", False), ("model.embed_tokens", True))
        ),
        *(
            recipe_of(
                cluster={**cluster, "gpu": gpu},
                training={**training, "low_precision": name, "low_precision_keep": keep},
            )
            for gpu, name, keep in (
                ("a100-sxm4-80gb", "fp8_rowwise", ()),
                ("h100-sxm-80gb", "fp8_tensorwise", ()),
                ("h100-sxm-80gb", "fp8_rowwise", ("oproj",)),
                ("h100-sxm-80gb", "fp8_rowwise", ("*",)),
            )
        ),
        recipe_of(
            cluster={**cluster, "gpu": "h100-sxm-80gb"},
            training={**training, "low_precision": "fp8_rowwise", "precision": "fp16"},
        ),
        dataclasses.replace(plain, extra={"wall_clock_breakdown": True}),
        recipe_of(cluster=cluster, training={**training, "sequence_length": 262_144}),
        recipe_of(cluster=cluster, training={**training, "gradient_accumulation_dtype": "bf16"}),
        recipe_of(cluster={**cluster, "gpu": "v100-sxm2-32gb"}, training=training),
        dataclasses.replace(half, model=dataclasses.replace(half.model, router_aux_loss=0.001)),
        recipe_of(cluster={**cluster, "inter_node_gbits_per_second": 50.0}, training=training),
        dataclasses.replace(plain, tracking=dataclasses.replace(plain.tracking, noise_scale=NOISE)),
        dataclasses.replace(
            plain,
            tracking=dataclasses.replace(plain.tracking, noise_scale=NOISE),
            training=dataclasses.replace(
                plain.training, objective=ObjectiveSection(name="dpo", beta=0.1)
            ),
        ),
        recipe_of(
            cluster=cluster,
            training={
                **training,
                "optimizer": dataclasses.replace(
                    plain.training.optimizer, name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4
                ),
            },
        ),
        recipe_of(
            cluster=cluster,
            training={
                **training,
                "optimizer": dataclasses.replace(plain.training.optimizer, name="adamw_8bit"),
            },
        ),
        recipe_of(
            cluster={
                "nodes": 5,
                "gpus_per_node": 4,
                "gpu": "b200-sxm-180gb",
                "nvlink_domain_gpus": 16,
            },
            training=training,
        ),
    )
