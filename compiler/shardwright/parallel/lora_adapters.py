"""Add the plan's LoRA adapters to the decoder layers' linears on a rank; everything else is frozen,
but for a reward model's head, which is trained in full as peft does by `modules_to_save`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.lora_target_paths import (
    ADAPTER,
    adapter_names,
    inject_lora,
    linear_paths,
    lora_config,
)
from shardwright.models.tasks.sequence_classification import HEAD
from shardwright.models.tasks.task_registry import Task
from shardwright.plan.plan import Plan, PlanLora
from shardwright.utils.installation import missing_peft

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def add_adapters(model: nn.Module, plan: Plan, transposed: frozenset[str]) -> None:
    """Add adapters in place; only they and modules_to_save(plan) are trained. They are drawn from
    the seed, equal on every rank.

    transposed: names of weights that are stored transposed to Hugging Face's

    Raises Refusal with SW6251, SW6252, or SW6256 where the model's adapters differ from the plan's.
    """
    if plan.lora is None:
        return
    if absent := missing_peft():
        raise Refusal(absent)
    torch.manual_seed(plan.training.seed)
    try:
        inject_lora(
            model, plan.lora, linear_paths(model, plan.model.cut.stack, plan.lora.target_modules)
        )
    except ValueError as error:  # a module whose parameters only look like a linear's
        raise refusal(
            "SW6252",
            f"peft cannot adapt these modules: {str(error).splitlines()[0]}",
            "Name linears alone in lora.target_modules, and compile again.",
            ("lora", "target_modules"),
        ) from None
    for path in modules_to_save(plan):
        model.get_submodule(path).requires_grad_(True)
    found = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    check_lora_adapters(
        found,
        planned_adapters(plan, transposed),
        rank=dist.get_rank() if dist.is_initialized() else 0,
    )


def modules_to_save(plan: Plan) -> tuple[str, ...]:
    """Return the modules that are trained in full beside adapters: a reward model's head."""
    is_saved = plan.lora is not None and plan.model.task_traits.scores_sequences
    return (HEAD,) if is_saved else ()


def planned_adapters(plan: Plan, transposed: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter that the plan trains beside frozen ones, by name.

    transposed: as add_adapters takes it
    """
    if plan.lora is None:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for p in (p for module in plan.tensor_parallel.modules for p in module.parameters):
        module, _, leaf = p.name.rpartition(".")
        inside = (
            p.name.startswith(plan.model.cut.stack + ".")
            and module.rpartition(".")[2] in plan.lora.target_modules
        )
        if module in modules_to_save(plan):
            found[p.name] = p.shape
        if inside and leaf == "weight" and len(p.shape) == 2:
            out, into = p.shape[::-1] if p.name in transposed else p.shape
            a, b = adapter_names(module)
            found |= {a: (plan.lora.rank, into), b: (out, plan.lora.rank)}
    return found


def check_lora_adapters(
    found: dict[str, tuple[int, ...]], planned: dict[str, tuple[int, ...]], *, rank: int = 0
) -> None:
    """Compare the shapes of trained parameters with the plan's.

    Raises Refusal with SW6256 that names the first differences.
    """
    differences = [
        f"{name}: {_shape(found.get(name))}, planned {_shape(planned.get(name))}"
        for name in dict.fromkeys((*planned, *found))
        if found.get(name) != planned.get(name)
    ]
    if differences:
        shown = "; ".join(differences[:3])
        raise refusal(
            "SW6256",
            (
                f"rank {rank}: {len(differences)} of {len(planned)} planned adapter tensors differ "
                f"in the model: {shown}"
            ),
            "Nothing was trained. Name other modules in lora.target_modules, or install a peft "
            "version that"
            " pyproject.toml names, and compile again.",
            ("lora",),
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape))


def peft_rewrites_targets(lora: PlanLora, model: nn.Module) -> bool:
    """Return whether peft would adapt other modules of this model than the run did.

    Depends on the adapter folder (models/lora_target_paths.py).
    """
    if missing_peft():
        return False
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = lora_config(lora, target_modules=list(lora.target_modules))
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
    except ValueError:  # part of a fused module
        return True
    return bool(config.target_parameters) or set(config.target_modules) != set(lora.target_modules)


def write_adapter_config(plan: Plan, task: Task, folder: Path, *, fan_in_fan_out: bool) -> None:
    """Write adapter_config.json.

    fan_in_fan_out: these are GPT-2's Conv1D

    Raises Refusal with SW6251.
    """
    if absent := missing_peft():
        raise Refusal(absent)
    assert plan.lora is not None
    config = lora_config(
        plan.lora,
        target_modules=list(plan.lora.target_modules),
        modules_to_save=list(modules_to_save(plan)) or None,
        task_type=task.peft_type,
        base_model_name_or_path=plan.model.weights_path,
        fan_in_fan_out=fan_in_fan_out,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


def hf_parameter_name(name: str) -> str:
    """Return Hugging Face's name of a parameter that peft moved into its wrapper; adapters keep
    theirs.

    A wrapper around a wrapper keeps the inner one's name, so that no two parameters share one.
    """
    return name if is_adapter(name) else name.replace(".base_layer.", ".")


def unique_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return parameters by name. Raises Refusal with SW6257 where two would be saved by one
    name."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in named:
        if found.setdefault(hf_parameter_name(name), parameter) is not parameter:
            raise refusal(
                "SW6257",
                (
                    f"two parameters of this rank have the name {hf_parameter_name(name)!r}: a "
                    "checkpoint "
                    "would hold one of them"
                ),
                "Nothing was saved. This is a bug of Shardwright: report the model type and the "
                "recipe.",
            )
    return found


def is_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"))


def peft_saved_name(name: str) -> str:
    """Return the name under which peft writes and loads a parameter."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def merge_adapter(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lora: PlanLora, *, is_transposed: bool
) -> torch.Tensor:
    """Return W + alpha / r * B A in fp32 (arXiv 2106.09685, section 4.1); is_transposed: W is
    (in, out)."""
    change = (lora.alpha / lora.rank) * (b.float() @ a.float())
    return weight.float() + (change.t() if is_transposed else change)
