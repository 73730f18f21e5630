"""`model.router_aux_loss`: the balance loss of a mixture's routers (models/router_aux_loss.py), and
where it does not run."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate

_KEY = "model.router_aux_loss"


def router_aux_loss_supported(x: Candidate) -> Diagnostic | None:
    """Tried on a tiny copy of this configuration."""
    if x.recipe.model.router_aux_loss is None:
        return None
    from shardwright.models.model_probe import router_affinity

    affinity = router_affinity(x.graph)
    if isinstance(affinity, str):
        return None
    return found(
        "SW3158",
        _KEY,
        f"the routers of a {x.graph.model_type!r} get no balance loss: {affinity.why}",
        "Write `router_aux_loss: off`, or leave it out.",
        ("off",),
    )


def router_aux_loss_verified(x: Candidate) -> Diagnostic | None:
    """fp16 scales the loss by a factor that changes as the run goes on."""
    beside = "precision: fp16" if x.recipe.training.precision == "fp16" else ""
    if x.recipe.lora is not None:
        beside = "LoRA"
    if x.recipe.model.router_aux_loss is None or not beside:
        return None
    return found(
        "SW3159",
        _KEY,
        f"router_aux_loss beside {beside} is not proved against a plain run",
        "Write `router_aux_loss: off`, or train in bf16 without LoRA.",
        ("off",),
    )


def router_aux_loss_requested_by_config(x: Candidate) -> Diagnostic | None:
    """`output_router_logits` is what makes Hugging Face's own forward add its loss."""
    config = x.graph.config
    if x.recipe.model.router_aux_loss is not None or config.get("output_router_logits") is not True:
        return None
    coefficient = config.get("router_aux_loss_coef", config.get("aux_loss_alpha"))
    return found(
        "SW3160",
        _KEY,
        (
            "the model's configuration asks for a balance loss (output_router_logits), which is "
            "off here"
        ),
        "Hugging Face's own loss does not add up over stages and micro-batches. "
        f"`router_aux_loss: {coefficient or 0.001}` trains with DeepSeek-V3's, which does; "
        "`output_router_logits: false` in the configuration says that none is wanted.",
        severity="warning",
    )
