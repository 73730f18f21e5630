"""Where `model.kernels: compile` runs: what is compared with a plain Hugging Face run, and nothing
else."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout_rule import Candidate
from shardwright.models.model_support import torch_compile_types
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2

_KEY = "model.kernels"
_HELP = "Write `kernels: hf`, or `kernels: auto`, which takes `compile` only where it is proved."


def compiled_model_verified(x: Candidate) -> Diagnostic | None:
    """Per type (models/torch_compile_types.json). A compiled layer draws other random numbers than
    the plain one, so dropout cannot be compared; flash-attn does not run where this is proved."""
    recipe, graph = x.recipe, x.graph
    if recipe.model.kernels != "compile":
        return None
    if not ENGINES[recipe.target].compiles_layers:
        why = f"under target: {recipe.target}"
    elif graph.model_type not in torch_compile_types():
        why = f"for model_type {graph.model_type!r}"
    elif graph.max_dropout:
        why = f"beside dropout {graph.max_dropout:g}"
    elif recipe.lora is not None:
        why = "beside LoRA, whose adapters stand inside the layers"
    elif graph.attention == FLASH_ATTENTION_2:
        why = "beside flash_attention_2: `attention: sdpa` takes torch's own fused kernels"
    elif recipe.training.precision == "fp16":
        why = "in fp16"
    else:
        return None
    return found(
        "SW3161", _KEY, f"torch.compile of the layers is not proved {why}", _HELP, ("hf", "auto")
    )


def compiled_layout_verified(x: Candidate) -> Diagnostic | None:
    """A graph of a layer would have collectives in it (tensor, context and expert ranks, ZeRO-3's
    gathers), the two halves of DualPipeV's backward pass, or a second pass over a part of it
    (selective recomputation)."""
    s = x.strategy
    if x.recipe.model.kernels != "compile":
        return None
    refused = {
        "tensor": s.tensor > 1,
        "context": s.context > 1,
        "expert": s.expert > 1,
        "schedule": s.schedule == "dualpipev",
        "zero_stage": s.zero_stage == 3,
        "activation_checkpointing": s.activation_checkpointing == "selective",
        "offload": s.offload != "none",
    }
    name = next((name for name, is_refused in refused.items() if is_refused), None)
    if name is None:
        return None
    message = f"torch.compile of the layers is not proved at {name}: {getattr(s, name)}"
    return found(
        "SW3162", ("parallelism", name), message, "Pin another value, or write `model.kernels: hf`."
    )


def liger_missing(x: Candidate) -> Diagnostic | None:
    """Liger's Triton kernels need a GPU to be compared with a plain run."""
    if x.recipe.model.kernels != "liger":
        return None
    return found(
        "SW3163",
        _KEY,
        (
            "kernels: liger is not in this version: its Triton kernels have not been compared with "
            "a plain run"
        ),
        (
            "Write `kernels: compile`, which fuses the same norms, rotary embeddings and "
            "activations, or `kernels: hf`."
        ),
        ("hf", "compile", "auto"),
    )
