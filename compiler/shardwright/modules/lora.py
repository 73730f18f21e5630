"""LoRA through peft: adapters put beside the linears of the decoder layers, everything else frozen.

peft is imported here and nowhere else, and only where the plan asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.diagnostics import Refusal, refusal
from shardwright.hf.task import Task
from shardwright.optional_packages import missing_peft
from shardwright.plan.plan import Plan, PlanLora

_ADAPTER = "default"
"""peft's name for the only adapter, a part of its parameters' names."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def add_adapters(model: nn.Module, plan: Plan) -> None:
    """In place; only the adapters are trained afterwards. Drawn from the training's seed, the same on every rank.

    Raises Refusal: SW6251, SW6252.
    """
    if plan.lora is None:
        return
    if absent := missing_peft():
        raise Refusal(absent)
    from peft import inject_adapter_in_model

    torch.manual_seed(plan.training.seed)
    paths = [
        name
        for name, _ in model.named_modules()
        if name.startswith(plan.model.cut.stack + ".") and name.rpartition(".")[2] in plan.lora.target_modules
    ]
    try:
        inject_adapter_in_model(_config(plan.lora, target_modules=paths), model)
    except ValueError as error:  # a module that only looks like a linear by its parameters
        raise refusal(
            "SW6252",
            f"peft does not adapt these modules: {str(error).splitlines()[0]}",
            "Name linears alone in lora.target_modules, and compile again.",
            ("lora", "target_modules"),
        ) from None


def _config(lora: PlanLora, **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, **more)


def write_config(lora: PlanLora, task: Task, base: str, folder: Path, *, fan_in_fan_out: bool) -> None:
    """adapter_config.json. base: where the frozen weights are. fan_in_fan_out: these are GPT-2's Conv1D.

    Raises Refusal: SW6251.
    """
    if absent := missing_peft():
        raise Refusal(absent)
    config = _config(
        lora,
        target_modules=list(lora.target_modules),
        task_type=task.peft_type,
        base_model_name_or_path=base,
        fan_in_fan_out=fan_in_fan_out,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


def plain_name(name: str) -> str:
    """Hugging Face's name of a parameter that peft moved into its wrapper; adapters keep theirs."""
    return name.replace(".base_layer.", ".")


def adapter_names(module: str) -> tuple[str, str]:
    """A's and B's, as the model has them."""
    return f"{module}.lora_A.{_ADAPTER}.weight", f"{module}.lora_B.{_ADAPTER}.weight"


def is_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"))


def saved_name(name: str) -> str:
    """As peft writes and loads it."""
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lora: PlanLora, *, turned: bool) -> torch.Tensor:
    """W + alpha / r * B A (arXiv 2106.09685, section 4.1), in fp32. turned: W is (in, out)."""
    change = (lora.alpha / lora.rank) * (b.float() @ a.float())
    return weight.float() + (change.t() if turned else change)
