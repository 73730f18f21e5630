"""Probe a model at compile time: a tiny copy of it runs unsplit and in isolated pieces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from shardwright.diagnostics import KeyPath, Refusal, refusal
from shardwright.models.config_schema import decode_special_floats
from shardwright.models.context_parallel_probe import context_split_blocker
from shardwright.models.expert_modules import expert_modules
from shardwright.models.layer_split import (
    ModelStructure,
    NotSplittable,
    find_inseparable_layers,
    find_layer_split,
    logits_of,
    probe,
    run_in_pieces,
)
from shardwright.models.lora_target_paths import lora_blocker
from shardwright.models.mixture_of_experts import NoRouterAuxLoss, detect_affinity
from shardwright.models.mixture_of_experts import expert_parallel_blocker as split_experts_blocker
from shardwright.models.model_files import exception_summary
from shardwright.models.model_graph import LayerRange, ModelGraph, PipelineSplit, name_pattern
from shardwright.models.model_skeleton import patch_forwards
from shardwright.models.packed_attention import packed_attention_arguments, packed_document_masks
from shardwright.models.tasks.causal_lm import own_loss
from shardwright.models.tasks.contrastive import probe_contrastive
from shardwright.models.tasks.sequence_classification import pooled_loss
from shardwright.models.tasks.task_registry import CAUSAL_LM, Task, task_named
from shardwright.models.tasks.vision_language import UnsupportedImages, modules_run_per_image
from shardwright.models.tiny_config import VOCABULARY, has_every_layer_kind, shrink
from shardwright.models.trainable_parameters import adapted_modules
from shardwright.recipe.literal_types import TaskName
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2, LoraSection
from shardwright.utils.installation import missing_peft
from shardwright.utils.numeric_difference import max_abs_diff, relative_error

# Whether packed documents attend to each other, given positions that restart at each document.


LENGTHS = ((7, 5, 12), (1, 16, 7))
"""Document lengths of each probe sequence: boundaries differ between sequences, and one document is
a single token."""
TOLERANCE = 2e-5
"""Largest relative error of the logits: matrix products of other shapes sum in another order."""


def positions() -> torch.Tensor:
    """Return positions (2, 24) int64; each document counts from 0."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@torch.no_grad()
def packing_blocker(model: PreTrainedModel, cut: PipelineSplit, input_ids: torch.Tensor) -> str:
    """Return why documents cannot be packed, "" where a tiny copy verifies that they can.

    Each document's logits must equal those of the document alone, and those of isolated pieces, as
    pipeline stages run. model: tiny, without dropout. input_ids: (2, 24).
    """
    place = positions()
    with packed_document_masks(model, place):
        keywords = packed_attention_arguments(model.config._attn_implementation, place)
        packed = model(input_ids=input_ids, use_cache=False, **keywords).logits
    if not packed.isfinite().all():
        return "a tiny copy's logits are not finite"
    scale = TOLERANCE * max(1.0, float(packed.abs().max()))
    for sequence, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            alone = model(
                input_ids=input_ids[sequence : sequence + 1, at : at + length], use_cache=False
            ).logits[0]
            difference = max_abs_diff(packed[sequence, at : at + length], alone)
            if not difference <= scale:
                return f"a packed document's logits differ by {difference:.1e} from its own"
            at += length
    outside = {id(p) for p in model.parameters()} - {
        id(p) for p in model.get_submodule(cut.stack).parameters()
    }
    pieces = run_in_pieces(model, cut, outside, outside, input_ids, place)
    difference = max_abs_diff(pieces, packed)
    if difference <= scale:
        return ""
    return f"packed logits of isolated layers differ by {difference:.1e} from the model's"


class _TinyCopyFailed(str):
    """A reason that may hold for the tiny copy only."""


IMAGES_NOT_VERIFIED = "its rows hold pictures, which is not proved"
MAX_PROBE_PARAMETERS = 250_000_000
"""Largest copy with the model's own widths: 1 GB in fp32, and as much again for one isolated
piece."""


def probe_config(
    config: PretrainedConfig,
    task: Task,
    attention: str,
    key: KeyPath,
    model: PreTrainedModel | None = None,
) -> ModelStructure:
    """Return the structure of a model. Raises SW2016 where it could not be split into layers that
    reproduce it.

    model: the full model on the meta device; a shallow copy that lacks a kind of layer is made as
        deep.
    """
    document, pinned = config.to_dict(), None if attention == "auto" else attention
    small = _text(task.small(document))
    has_every_kind = True
    if model is not None:
        with _isolated_rng(), torch.device("meta"), contextlib.suppress(Exception):
            # The probe reports what the copy raises.
            shallow = _build(config.model_type, task.name, small, pinned)
            has_every_kind = has_every_layer_kind(model, shallow)
    if not has_every_kind:
        small = _text(task.small(document, depth=False))
    structure = _probe(config.model_type, task.name, small, pinned, most_parameters=None)
    if isinstance(structure, _TinyCopyFailed):
        # The tiny sizes may not fit each other: try the model's own.
        own_widths = _text(task.small(document, widths=False))
        unshrunk = _probe(
            config.model_type, task.name, own_widths, pinned, most_parameters=MAX_PROBE_PARAMETERS
        )
        structure = unshrunk if isinstance(unshrunk, ModelStructure) else structure
    if isinstance(structure, ModelStructure) and structure.cut.together:
        # The shallow copy has fewer layers that could share state.
        deep = _inseparable_layers(
            config.model_type, task.name, _text(task.small(document, depth=False)), pinned
        )
        if isinstance(deep, str):
            raise unsplittable_error(config, deep, key)
        cut = dataclasses.replace(structure.cut, together=deep)
        structure = dataclasses.replace(structure, cut=cut)
    if isinstance(structure, str):
        raise unsplittable_error(config, structure, key)
    return structure


def _text(document: dict[str, object]) -> str:
    return json.dumps(document, sort_keys=True, default=str)


def unsplittable_error(config: PretrainedConfig, why: str, key: KeyPath) -> Refusal:
    return refusal(
        "SW2016",
        f"model_type {config.model_type!r} cannot be split into layers: {why}",
        "A tiny copy of the model must give the same bits in one piece and in isolated pieces. "
        "Use a model of another type.",
        key,
    )


@functools.lru_cache(maxsize=256)
def _probe(
    model_type: str,
    task: TaskName,
    text: str,
    attention: str | None,
    *,
    most_parameters: int | None,
) -> ModelStructure | str:
    """Probe a copy; return the reason as text where it cannot be split, so that it is cached
    too."""
    with _isolated_rng():
        try:
            if most_parameters is not None:
                with torch.device("meta"):
                    count = sum(
                        p.numel() for p in _build(model_type, task, text, attention).parameters()
                    )
                if count > most_parameters:
                    return _TinyCopyFailed("it is too large to run as it is")
            model = _random_model(model_type, task, text, attention, adapted=False)
            if task_named(task).traits.compares_pairs:
                return probe_contrastive(model, task_named(task).example(model.config))
            tokens, beside = task_named(task).shown(model)
            with torch.no_grad():
                original = logits_of(model, tokens, beside)
                if patch_forwards(model) and not torch.equal(
                    logits_of(model, tokens, beside), original
                ):
                    raise NotSplittable("between its layers more happens than its adapter knows")
            scores = task_named(task).traits.scores_sequences
            probed = probe(model, tokens, beside, pooled_loss if scores else own_loss)
            if beside is None:
                # A sparse indexer may attend to another document with some texts only.
                texts = (tokens, *(task_named(task).example(model.config) for _ in range(3)))
                whys = (_why_not_packed(model, probed.cut, text) for text in texts)
                return dataclasses.replace(probed, packing=next(filter(None, whys), ""))
            per_image = modules_run_per_image(model, VOCABULARY, probed.cut.stack)
            return dataclasses.replace(
                probed, packing=IMAGES_NOT_VERIFIED, modules_run_per_image=per_image
            )
        except UnsupportedImages as reason:
            return _TinyCopyFailed(reason)
        except NotSplittable as reason:
            return str(reason)
        except Exception as error:  # a type's code may raise anything at this size
            lines = str(error).strip().splitlines() or [""]
            return _TinyCopyFailed(
                f"its tiny copy does not run ({type(error).__name__}: {lines[-1][:200]})"
            )


def _why_not_packed(model: PreTrainedModel, cut: PipelineSplit, tokens: torch.Tensor) -> str:
    try:
        return packing_blocker(model, cut, tokens)
    except Exception as error:  # a forward without positions, for example
        return f"a tiny copy does not take packed documents ({exception_summary(error, 120)})"


@torch.no_grad()
def flash_attention_error(config: PretrainedConfig) -> float:
    """Return the relative error of a tiny copy's logits with flash attention, against eager
    attention.

    The kernels silently leave out attention sinks and biases.
    """
    text, task = _text(CAUSAL_LM.small(config.to_dict())), CAUSAL_LM
    with _isolated_rng():
        model = _random_model(config.model_type, task.name, text, FLASH_ATTENTION_2)
        tokens = task.example(model.config)
        eager = _build(config.model_type, task.name, text, "eager")
        eager.load_state_dict(model.state_dict())
        patch_forwards(eager.train())
        flash, expected = (m(input_ids=tokens, use_cache=False).logits for m in (model, eager))
    return relative_error(flash, expected)


def _narrow(graph: ModelGraph) -> tuple[str, str, str]:
    """Return (type, configuration, attention) of a narrow copy as deep as the model; flash
    attention becomes eager."""
    attention = "eager" if graph.attention == FLASH_ATTENTION_2 else graph.attention
    return graph.model_type, _text(shrink(dict(graph.config), depth=False)), attention


@functools.lru_cache(maxsize=256)
def _of_narrow_copy(
    model_type: str, text: str, attention: str, test: Callable[..., Any], *more: Hashable
) -> Any:
    """Return test(model, tokens, *more) of a copy, or what its code raises as _TinyCopyFailed."""
    with _isolated_rng():
        try:
            model = _random_model(model_type, CAUSAL_LM.name, text, attention)
            return test(model, CAUSAL_LM.example(model.config), *more)
        except Exception as error:  # a type's code may raise anything on a part of its inputs
            return _TinyCopyFailed(exception_summary(error, 120))


def context_parallel_blocker(graph: ModelGraph) -> str:
    """Return why this model's sequences cannot be split over context ranks, "" where they can."""
    if not graph.task_traits.tiny_copy:
        return IMAGES_NOT_VERIFIED
    why: str = _of_narrow_copy(*_narrow(graph), context_split_blocker)
    return (
        f"a tiny copy does not run on a piece of a row ({why})"
        if isinstance(why, _TinyCopyFailed)
        else why
    )


def expert_parallel_blocker(graph: ModelGraph) -> str:
    """Return why this model's experts cannot be split over expert ranks, "" where they can."""
    if not graph.task_traits.tiny_copy:
        return IMAGES_NOT_VERIFIED
    planned = frozenset(name_pattern(path) for path in expert_modules(graph))
    if not planned:
        return "no parameter of it is a stack of experts"
    why: str = _of_narrow_copy(*_narrow(graph), split_experts_blocker, planned)
    return (
        f"a tiny copy does not run with some of its experts ({why})"
        if isinstance(why, _TinyCopyFailed)
        else why
    )


def router_affinity(graph: ModelGraph) -> str | NoRouterAuxLoss:
    """Return a key of mixture_of_experts.AFFINITIES, or why the routers get no auxiliary loss."""
    if not graph.task_traits.tiny_copy:
        return NoRouterAuxLoss(IMAGES_NOT_VERIFIED)
    found: str | NoRouterAuxLoss = _of_narrow_copy(*_narrow(graph), detect_affinity)
    if isinstance(found, _TinyCopyFailed):
        return NoRouterAuxLoss(f"a tiny copy does not run ({found})")
    return found


def _small(graph: ModelGraph) -> tuple[str, TaskName, str, str]:
    """Return (type, task, configuration, attention) of a tiny copy; flash attention becomes
    eager."""
    text = _text(task_named(graph.task).small(dict(graph.config), depth=False))
    attention = "eager" if graph.attention == FLASH_ATTENTION_2 else graph.attention
    return graph.model_type, graph.task, text, attention


def check_lora_adapters(graph: ModelGraph, lora: LoraSection) -> None:
    """Try the adapters on a tiny copy. Raises Refusal: SW3221.

    Does nothing without peft (each rank reports that), for remote code, or for a contrastive model.
    """
    if missing_peft() or graph.model_type not in CONFIG_MAPPING or graph.task_traits.compares_pairs:
        return
    names = adapted_modules(graph, lora)
    planned = frozenset(
        name_pattern(p.name.removesuffix(".weight"))
        for layer in graph.layers
        for p in layer.parameters
        if layer.kind == "decoder"
        and p.name.split(".")[-2:] in [[name, "weight"] for name in names]
    )
    why = _why_not_adapted(*_small(graph), graph.cut.stack, lora, names, planned)
    if why:
        raise refusal(
            "SW3221",
            f"adapters do not train on a tiny copy of this {graph.model_type!r}: {why}",
            "Name other modules in lora.target_modules, or remove the `lora` section.",
            ("lora", "target_modules"),
        )


@functools.lru_cache(maxsize=256)
def _why_not_adapted(
    model_type: str,
    task: TaskName,
    text: str,
    attention: str,
    stack: str,
    lora: LoraSection,
    names: tuple[str, ...],
    planned: frozenset[str],
) -> str:
    with _isolated_rng(), warnings.catch_warnings():
        try:
            model = _random_model(model_type, task, text, attention)
            ids, beside = task_named(task).shown(model)
            warnings.simplefilter("ignore")  # peft warns that it transposes GPT-2's weights
            return lora_blocker(
                model, stack, lora, names, planned, lambda: logits_of(model, ids, beside)
            )
        except Exception as error:  # a type's code may raise anything at this size
            return f"it does not run with them ({exception_summary(error, 120)})"


def check_low_precision(graph: ModelGraph, paths: tuple[str, ...]) -> None:
    """Try the linears that low precision converts on a tiny copy. Raises Refusal: SW3222.

    Does nothing for remote code.
    """
    if graph.model_type not in CONFIG_MAPPING:
        return
    planned = frozenset(map(name_pattern, paths))
    if why := _why_not_converted(*_small(graph), planned):
        raise refusal(
            "SW3222",
            f"low precision does not reach a linear of this {graph.model_type!r}: {why}",
            "Name the linear in training.low_precision_keep.",
            ("training", "low_precision"),
        )


@functools.lru_cache(maxsize=256)
def _why_not_converted(
    model_type: str, task: TaskName, text: str, attention: str, planned: frozenset[str]
) -> str:
    """Return what is wrong with a planned module of a tiny copy: it is no linear, or a forward uses
    its weight without calling it; "" where all are called."""
    with _isolated_rng():
        try:
            model = _random_model(model_type, task, text, attention)
            ids, beside = task_named(task).shown(model)
            modules = {
                path: module
                for path, module in model.named_modules()
                if name_pattern(path) in planned
            }
            called: set[nn.Module] = set()
            for path, module in modules.items():
                if type(module) not in (nn.Linear, Conv1D):
                    return f"{path} is a {type(module).__name__}"
                module.register_forward_pre_hook(lambda own, _: called.add(own))
            logits_of(model, ids, beside)
        except Exception as error:  # a type's code may raise anything at this size
            return f"a tiny copy does not run ({exception_summary(error, 120)})"
    uncalled = next((path for path, module in modules.items() if module not in called), "")
    return f"its forward never calls {uncalled}" if uncalled else ""


@functools.lru_cache(maxsize=256)
def _inseparable_layers(
    model_type: str, task: TaskName, text: str, attention: str | None
) -> tuple[LayerRange, ...] | str:
    """Return `PipelineSplit.together` of a narrow copy as deep as the model, or why it is
    unknown."""
    with _isolated_rng():
        try:
            model = _random_model(model_type, task, text, attention)
            tokens, beside = task_named(task).shown(model)
            return find_inseparable_layers(
                model, find_layer_split(model, tokens, beside), tokens, beside
            )
        except Exception as error:
            why = "its layers share state, and a narrow copy does not run at its depth"
            return f"{why} ({type(error).__name__})"


def _build(model_type: str, task: TaskName, text: str, attention: str | None) -> PreTrainedModel:
    return task_named(task).build(
        CONFIG_MAPPING[model_type].from_dict(decode_special_floats(json.loads(text))), attention
    )


def _random_model(
    model_type: str, task: TaskName, text: str, attention: str | None, *, adapted: bool = True
) -> PreTrainedModel:
    """Build a model in training mode with random weights; a tiny configuration has no dropout."""
    model = _build(model_type, task, text, attention)
    model.train()
    if adapted:
        patch_forwards(model)
    with torch.no_grad():
        for parameter in model.parameters():  # no bias all zero, no norm weight all one
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@contextlib.contextmanager
def _isolated_rng() -> Iterator[None]:
    """Use an own random state, and silence transformers' warnings about the tiny copy."""
    state, verbosity = torch.get_rng_state(), logging.get_verbosity()
    torch.manual_seed(0)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        logging.set_verbosity(verbosity)
