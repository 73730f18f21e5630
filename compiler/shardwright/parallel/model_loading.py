"""Build the Hugging Face model and its first weights, with Conv1D replaced by Linear in every
layout."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.pytorch_utils import Conv1D

from shardwright.diagnostics import refusal
from shardwright.layout.formats import FORMATS
from shardwright.models.config_schema import decode_special_floats
from shardwright.models.mixture_of_experts import use_grouped_mm_where_it_fits
from shardwright.models.remote_code_import import register
from shardwright.models.tasks.sequence_classification import HEAD_WEIGHT
from shardwright.models.tasks.task_registry import task_named
from shardwright.parallel.weight_files import SliceRange, WeightFiles, Weights
from shardwright.parallel.weight_loader import EmptyWeights, LayerSeededWeights, empty_model
from shardwright.plan.plan import Plan

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, row.torch_dtype) for name, row in FORMATS.items()
}


def load_config(plan: Plan, folder: Path) -> PretrainedConfig:
    """Load the configuration, with the model's own code where it has some. Raises Refusal with
    SW6008.

    Whoever runs a compiled folder trusts its code; commands that take another folder ask first.
    """
    if plan.model.remote_code is not None:
        code = (folder / plan.model.config_file).parent
        try:
            register(code, plan.model.remote_code)
        except Exception as error:  # whatever the files raise
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise refusal(
                "SW6008",
                f"the model's own code in {str(code)!r} cannot be used: {why}",
                "Compile the recipe again, and do not edit the files in model/.",
            ) from None
    document = decode_special_floats(
        json.loads((folder / plan.model.config_file).read_text(encoding="utf-8"))
    )
    model_type = document.pop("model_type")
    document.pop("auto_map", None)
    return AutoConfig.for_model(model_type, **document)


EXACT_PARAMETERS = 10_000_000_000
"""Limits the size up to which random weights equal Hugging Face's; larger models are initialized
layer by layer, equal in every layout."""


def open_model(plan: Plan, folder: Path, *, resumes: bool) -> tuple[nn.Module, Weights]:
    """Return the model without storage, in training mode, and its weights. Collective.

    The weights are empty where a checkpoint follows. "random" equals `torch.manual_seed(seed)` and
    `from_config` of one process, up to EXACT_PARAMETERS. Raises Refusal with SW6211.
    """
    use_grouped_mm_where_it_fits()
    config = load_config(plan, folder)
    model = empty_model(config, plan.model.attention, plan.model.task)
    # ZeRO's flat optimizer treats a missing gradient as zero, so weight decay would shrink these.
    for name, parameter in model.named_parameters():
        if plan.model.is_frozen(name):
            parameter.requires_grad_(False)
    if resumes:
        return model, EmptyWeights(model)
    weights = (
        _pretrained(plan, config, model)
        if plan.model.weights == "pretrained"
        else _random(plan, folder, config, model)
    )
    stored = set(weights.names())
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(weights.read(name, None))
    return model, weights


def _pretrained(plan: Plan, config: PretrainedConfig, model: PreTrainedModel) -> Weights:
    assert plan.model.weights_path is not None
    files = WeightFiles(Path(plan.model.weights_path), model)
    stored = set(files.names())
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
        if name in stored:
            files.check(name, tuple(parameter.shape))
    missing = [names[0] for names in by_tensor.values() if not stored & set(names)]
    if plan.model.task_traits.scores_sequences and missing == [HEAD_WEIGHT]:
        return WeightsWithNewHead(plan, files, model)
    if missing:
        raise files.refusal(f"{missing[0]} and {len(missing) - 1} more tensors are missing")
    return files


class WeightsWithNewHead:
    """Read a language model's files, and draw the head of a reward model as its type initializes
    it, from the seed: the same in every layout."""

    def __init__(self, plan: Plan, files: WeightFiles, model: PreTrainedModel) -> None:
        self.files = files
        self.drawn = LayerSeededWeights(model, plan.model.cut.stack, plan.training.seed)

    def names(self) -> Iterable[str]:
        return (*self.files.names(), HEAD_WEIGHT)

    def read(self, name: str, range_: SliceRange | None) -> torch.Tensor:
        owner = self.drawn if name == HEAD_WEIGHT else self.files
        return owner.read(name, range_)

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        owner = self.drawn if name == HEAD_WEIGHT else self.files
        return owner.may_round(name, dtype)


@contextlib.contextmanager
def names_safetensors_file(path: Path) -> Iterator[Path]:
    """Turn what the disk refuses to safetensors into an OSError of that file."""
    try:
        yield path
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def _random(plan: Plan, folder: Path, config: PretrainedConfig, model: PreTrainedModel) -> Weights:
    """Initialize the whole model in one process a host, and share its file with the host's other
    ranks.

    Only the whole sequence of random numbers gives Hugging Face's values.
    """
    if plan.model.total_parameters > EXACT_PARAMETERS:
        return LayerSeededWeights(model, plan.model.cut.stack, plan.training.seed)
    mine = plan.ranks[dist.get_rank()]
    drawn = folder / "run" / "initial" / f"node-{mine.node}"
    if mine.slot == 0:
        shutil.rmtree(drawn, ignore_errors=True)
        drawn.mkdir(parents=True)
        torch.manual_seed(plan.training.seed)
        whole = task_named(plan.model.task).build(config, plan.model.attention)
        kept = remove_tied_weights_from_state_dict(dict(whole.state_dict()), whole)
        with names_safetensors_file(drawn / "model.safetensors") as path:
            save_file({name: tensor.contiguous() for name, tensor in kept.items()}, path)
        del whole, kept
    dist.barrier()
    files = WeightFiles(drawn, None)
    dist.barrier()
    if mine.slot == 0:
        shutil.rmtree(drawn)  # every rank has mapped the file by now
    return files


def scalars_to_vectors(model: nn.Module) -> None:
    """Give a parameter without a dimension (CLIP's logit_scale) one of length 1.

    DeepSpeed broadcasts parameters by a view of their bytes and multiplies gradients by a vector
    (runtime/engine.py, _broadcast_model; runtime/utils.py, clip_grad_norm_). The model has no
    storage yet; `export` removes the dimension again.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 0:
                vector = parameter.detach().reshape(1)
                module._parameters[name] = nn.Parameter(
                    vector, requires_grad=parameter.requires_grad
                )


def conv1d_names(model: nn.Module) -> frozenset[str]:
    """Return the weights that GPT-2's Conv1D holds as (in, out)."""
    return frozenset(
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)
    )


def conv1d_to_linear(model: nn.Module) -> frozenset[str]:
    """Replace GPT-2's Conv1D (weight: in x out) by Linear (out x in), one layout for every engine.

    Returns the names of the transposed weights.
    """
    transposed_names = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            transposed_names.append(f"{name}.weight")
            with torch.device("meta"):
                linear = nn.Linear(module.weight.shape[0], module.weight.shape[1])
            # The parameter has no storage yet; WeightLoader transposes what it reads.
            linear.weight = nn.Parameter(
                module.weight.detach().t(), requires_grad=module.weight.requires_grad
            )
            linear.bias = module.bias
            model.set_submodule(name, linear)
    return frozenset(transposed_names)
