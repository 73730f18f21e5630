"""The Hugging Face model with its first weights, and the one change of representation that every layout shares."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.hf.floats import untagged
from shardwright.hf.own_code import register
from shardwright.ir.names import pattern
from shardwright.plan.plan import Plan


def load_config(plan: Plan, folder: Path) -> PretrainedConfig:
    """The compiled folder's own copy of the model's config."""
    if plan.model.own_code is not None:
        _register_own_code(plan, (folder / plan.model.config_file).parent)
    document = untagged(json.loads((folder / plan.model.config_file).read_text(encoding="utf-8")))
    model_type = document.pop("model_type")
    return AutoConfig.for_model(model_type, **document)


def _register_own_code(plan: Plan, folder: Path) -> None:
    """Only for a plan whose recipe trusted the code by name. Raises Refusal: SW6008."""
    assert plan.model.own_code is not None
    try:
        register(folder, plan.model.own_code)
    except (OSError, ValueError) as error:
        raise Refusal(
            Diagnostic(
                code="SW6008",
                message=f"the model's own code in {str(folder)!r} cannot be used: {error}",
                help="Compile the recipe again; what is in model/ is not to be edited.",
            )
        ) from None


def build_model(plan: Plan, folder: Path) -> nn.Module:
    """The whole model on the CPU in fp32, in training mode.

    "random" is exactly what a plain process gets from `torch.manual_seed(seed)` and `from_config`.
    """
    config = load_config(plan, folder)
    if plan.model.weights == "pretrained":
        assert plan.model.weights_path is not None
        model = AutoModelForCausalLM.from_pretrained(
            plan.model.weights_path,
            config=config,
            dtype=torch.float32,
            attn_implementation=plan.model.attention,
            local_files_only=True,
        )
    else:
        torch.manual_seed(plan.training.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=plan.model.attention)
    model.train()
    # ZeRO's flat optimizer takes a missing gradient for zero, and would let weight decay shrink these.
    for name, parameter in model.named_parameters():
        if pattern(name) in plan.model.cut.untrained:
            parameter.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def conv1d_to_linear(model: nn.Module) -> frozenset[str]:
    """Replaces GPT-2's Conv1D (weight: in x out) by Linear (out x in), so that one layout serves every engine.

    DeepSpeed's tensor-parallel layers cut nn.Linear only. Returns the names of the weights that it turned round.
    """
    turned = transposed_weights(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            with torch.device("meta"):
                linear = nn.Linear(module.weight.shape[0], module.weight.shape[1])
            linear.weight = nn.Parameter(module.weight.detach().t().contiguous())
            linear.bias = module.bias
            model.set_submodule(name, linear)
    return turned


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights that conv1d_to_linear stores transposed."""
    return frozenset(f"{name}.weight" for name, m in model.named_modules() if isinstance(m, Conv1D))
