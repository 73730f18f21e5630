"""Every key of a recipe under `target: megatron`: it runs, or what is said instead. Of keys that a
search may settle, rules.py speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic, found
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_types import JsonScalar


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedKey:
    """value: of a recipe, "given" for a section. allowed: what runs. why: of what does not."""

    value: Callable[[Recipe], JsonScalar]
    allowed: tuple[JsonScalar, ...]
    why: str


def _given(section: object) -> str | None:
    return "given" if section else None


REFUSED_KEYS: Mapping[str, RefusedKey] = {
    "training.precision": RefusedKey(
        value=lambda r: r.training.precision,
        allowed=("bf16", "fp32"),
        why="fp16 wants a loss scale that checkpoints of this engine do not hold",
    ),
    "training.gradient_accumulation_dtype": RefusedKey(
        value=lambda r: r.training.gradient_accumulation_dtype,
        allowed=(None, "fp32"),
        why="it sums gradients in fp32",
    ),
    "model.loss": RefusedKey(
        value=lambda r: r.model.loss,
        allowed=("auto", "full"),
        why="its head gives the logits of a whole micro-batch",
    ),
    "model.kernels": RefusedKey(
        value=lambda r: r.model.kernels,
        allowed=("hf", "auto"),
        why="its layers are Megatron-Core's own modules",
    ),
    "model.task": RefusedKey(
        value=lambda r: r.model.task,
        allowed=("auto", "causal-lm"),
        why="it runs no model that sees",
    ),
    "model.freeze": RefusedKey(
        value=lambda r: _given(r.model.freeze), allowed=(None,), why="it trains every parameter"
    ),
    "model.router_aux_loss": RefusedKey(
        value=lambda r: r.model.router_aux_loss,
        allowed=(None,),
        why="its hooks are on the routers of Hugging Face's modules",
    ),
    "model.attention": RefusedKey(
        value=lambda r: r.model.attention,
        allowed=("auto", "eager", "sdpa"),
        why="its attention is torch's scaled_dot_product_attention",
    ),
    "training.outer": RefusedKey(
        value=lambda r: _given(r.training.outer),
        allowed=(None,),
        why="islands were not tried under it",
    ),
    "lora": RefusedKey(
        value=lambda r: _given(r.lora),
        allowed=(None,),
        why="adapters are made for Hugging Face's modules",
    ),
    "extra": RefusedKey(
        value=lambda r: _given(r.extra), allowed=(None,), why="they are keys of ds_config.json"
    ),
}
"""A recipe's key, by its path -> what of it does not run."""

SUPPORTED_KEYS: tuple[str, ...] = (
    *("version", "name", "extends", "target", "objective", "cluster", "data", "validation"),
    *("launch", "checkpoint", "tracking", "assume"),
    *("model.source", "model.config", "model.revision", "model.weights", "model.trust_remote_code"),
    "model.transformer_engine",
    *(
        "training.sequence_length",
        "training.global_batch_size",
        "training.steps",
        "training.tokens",
    ),
    *("training.epochs", "training.optimizer", "training.scheduler", "training.gradient_clipping"),
    *("training.stop_after_nonfinite", "training.seed", "training.days_at_most"),
    *(
        "parallelism.tensor",
        "parallelism.pipeline",
        "parallelism.data",
        "parallelism.micro_batch_size",
    ),
    *("parallelism.activation_checkpointing", "parallelism.memory_headroom"),
)
"""Keys and sections that run as under any engine. Of the other keys of `parallelism` speak the
rules (rules.py), and of axes that this engine does not have SW1909."""


def check_recipe_keys(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Every key that does not run, at once."""
    return tuple(
        found(
            "SW1922",
            name,
            f"{name}: {'this section' if key.value(recipe) == 'given' else key.value(recipe)} does "
            f"not run under target: megatron: {key.why}",
            "Change it, or write `target: deepspeed`.",
            tuple(str(value) for value in key.allowed if value is not None),
        )
        for name, key in REFUSED_KEYS.items()
        if key.value(recipe) not in key.allowed
    )
