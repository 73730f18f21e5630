"""Trace a configuration into a ModelGraph on the meta device (no weights, no memory).

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal
from shardwright.models.hf_config import (
    check_model_type,
    config_error,
    config_json,
    first_size,
    resolve_config,
    text_config,
)
from shardwright.models.image_processor import with_usual_tiles
from shardwright.models.layer_split import ModelStructure
from shardwright.models.layer_trace import LayerTrace, trace_model
from shardwright.models.model_graph import (
    Layer,
    ModelGraph,
    Parameter,
    config_sha256,
)
from shardwright.models.model_probe import (
    context_parallel_blocker,
    expert_parallel_blocker,
    flash_attention_error,
    probe_config,
    unsplittable_error,
)
from shardwright.models.model_skeleton import parameter_aliases
from shardwright.models.packed_attention import emulate_flash_attention
from shardwright.models.tasks.contrastive import use_text_encoder
from shardwright.models.tasks.task_registry import Task, text_attention
from shardwright.models.tensor_parallel_plan import tensor_parallel_styles
from shardwright.models.vision_trace import trace_vision_encoder
from shardwright.recipe.literal_types import TaskName
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from shardwright.utils.json_values import JsonObject

# One layer of the ModelGraph: traced, else by formulas over parameter shapes.


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Sizes of the text model, from the configuration where it has them as one number."""

    hidden: int
    feed_forward: int
    vocabulary: int
    outputs: int
    heads: int
    key_value_heads: int
    head_dim: int
    gated: bool
    dropout: bool


def make_layer(
    name: str,
    kind: str,
    parameters: list[Parameter],
    config: PretrainedConfig,
    shapes: TextSizes,
    traced: LayerTrace | str,
) -> Layer:
    """Build a layer from its trace, or from formulas where `traced` is the reason that it has none.

    kind: embedding | decoder | head.
    """
    matmul = scores = projections = 0
    activations = attention = scores_elements = 0
    if kind == "head":
        matmul = 2 * shapes.outputs * shapes.hidden
        # The final norm's input and output; logits are the cost model's workspace.
        activations = 2 * shapes.hidden
    elif kind == "decoder":
        config = getattr(config, "ffn_config", config)  # dbrx keeps its experts' numbers there
        for p in parameters:
            if len(p.shape) < 2:
                continue
            flops = 2 * p.numel
            if len(p.shape) == 3 or ".experts." in p.name:  # only for the tokens routed to it
                experts = first_size(config, *_EXPERTS) or p.shape[0]
                chosen = first_size(config, *_CHOSEN_EXPERTS) or experts
                flops = flops * min(chosen, experts) // experts
            matmul += flops
        scores = 4 * shapes.heads * shapes.head_dim
        # Q and O, K and V: two matrices each.
        each = 4 * shapes.hidden * shapes.head_dim
        projections = min(matmul, each * (shapes.heads + shapes.key_value_heads))
        # Korthikanti et al. (arXiv 2205.05198), section 4.1, with grouped keys and values, in
        # two-byte elements: Q, K, V and the output projection's input. The attention module's
        # input is counted as the norm's output.
        attention = (2 * shapes.heads + 2 * shapes.key_value_heads) * shapes.head_dim
        scores_elements = (5 * shapes.heads + 1) // 2
        # Inputs and outputs of both norms; of the feed-forward the activation's input and output,
        # or gate, up, activated gate and product; two dropout masks of one byte.
        activations = attention + 4 * shapes.hidden
        activations += (4 if shapes.gated else 2) * shapes.feed_forward
        activations += shapes.hidden if shapes.dropout else 0
    backward = 2 * matmul, 2 * scores
    if isinstance(traced, LayerTrace):
        (matmul, scores), backward = traced.forward, traced.backward
        projections = traced.attention_module_per_token
    return Layer(
        name=name,
        kind=kind,
        parameters=tuple(parameters),
        flops_source=f"counted: {traced}" if isinstance(traced, str) else "traced",
        matmul_flops_per_token=matmul,
        attention_flops_per_token_per_position=scores,
        attention_module_flops_per_token=projections,
        backward_flops_per_token=backward[0],
        backward_flops_per_token_per_position=backward[1],
        kept=() if isinstance(traced, str) else traced.kept,
        activation_elements_per_token=activations,
        attention_activation_elements_per_token=attention,
        attention_matrix_elements_per_token_per_position=scores_elements,
    )


FLASH_TOLERANCE = 1e-4
"""Largest relative error of the logits: a kernel sums in another order."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: the copies are tiny, and threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def trace_model_graph(
    config: JsonObject, attention: str, inline: bool, asked: TaskName | Literal["auto"] = "auto"
) -> ModelGraph:
    """Trace the model of a configuration. Raises Refusal (SW2xxx) where it cannot be built or
    split.

    config: as written, without auto_map (remote_code.py).
    inline: whether it is in the recipe itself.
    asked: the recipe's `model.task`.
    """
    key: KeyPath = ("model", "config") if inline else ("model", "source")
    task = check_model_type(config, key, inline, asked)
    hf_config = resolve_config(config, key, inline, asked)
    _refuse_unsplittable(hf_config, key)
    model = _on_meta(hf_config, task, None, key)
    check_attention(model, hf_config, attention)
    plain = config_json(hf_config, type(model).__name__)
    with emulate_flash_attention() if attention == FLASH_ATTENTION_2 else nullcontext():
        probed = probe_config(hf_config, task, attention, key, model)
        if not task.traits.has_images:  # a rule refuses it there
            _check_flash(hf_config, attention)
        if task.traits.compares_pairs:
            use_text_encoder(model)
    with (
        emulate_flash_attention(shapes_only=True)
        if attention == FLASH_ATTENTION_2
        else nullcontext()
    ):
        if attention not in ("auto", text_attention(model.config)):
            model = _on_meta(
                hf_config, task, attention, key
            )  # some types choose their modules by it
            if task.traits.compares_pairs:
                use_text_encoder(model)
        graph = dataclasses.replace(
            _measure(model, hf_config, task, probed, plain, key), task=task.name
        )
        if task.traits.has_images:
            vision = trace_vision_encoder(model, probed.cut)
            if task.traits.compares_pairs:
                # The final modules of its encoders and its scale are no projector.
                inside = tuple(f"{path}." for path in vision.tower)
                outside = (p for p in vision.projector if not p.startswith(inside))
                projector = tuple(path for path in outside if path not in probed.head)
                vision = dataclasses.replace(vision, projector=projector)
            else:
                vision = with_usual_tiles(vision, model.config, inline=inline)
            graph = dataclasses.replace(graph, vision=vision)
    context, expert = context_parallel_blocker(graph), expert_parallel_blocker(graph)
    graph = dataclasses.replace(
        graph, context_parallel_reason=context, expert_parallel_reason=expert
    )
    graph.verify()
    return graph


def _on_meta(
    hf_config: PretrainedConfig, task: Task, attention: str | None, key: KeyPath
) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            # float32: the cost model scales element sizes.
            return task.build(hf_config, attention)
    except Exception as error:
        raise config_error(error, key) from None


def _check_flash(hf_config: PretrainedConfig, attention: str) -> None:
    if (
        attention == FLASH_ATTENTION_2
        and not (error := flash_attention_error(hf_config)) <= FLASH_TOLERANCE
    ):
        message = (
            f"flash attention computes something else for {hf_config.model_type!r}: a tiny "
            f"copy's logits differ by {error:.0e} from those with eager attention"
        )
        raise _no_attention(message, ("auto", "eager"))


def _no_attention(message: str, valid: tuple[str, ...]) -> Refusal:
    help = "Set attention to `auto` for transformers' choice."
    return Refusal(
        Diagnostic(
            code="SW2008", message=message, help=help, key=("model", "attention"), valid=valid
        )
    )


def _measure(
    model: PreTrainedModel,
    hf_config: PretrainedConfig,
    task: Task,
    probed: ModelStructure,
    plain: JsonObject,
    key: KeyPath,
) -> ModelGraph:
    stack_path = probed.cut.stack
    placed = _parameters_by_layer(model, probed)
    if placed is None:
        raise unsplittable_error(
            hf_config, "its tiny copy does not have all of its parameters", key
        )
    # Configurations also name dropouts of heads that a causal LM lacks.
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    for module in model.modules():
        named = (value for name, value in vars(module).items() if "dropout" in name)
        dropouts += [value for value in named if isinstance(value, float)]
    max_dropout = float(max(dropouts, default=0.0))
    text, first_layer = text_config(hf_config), placed[1]
    table = getattr(model.get_output_embeddings(), "weight", None)  # musicgen has a list of heads
    hidden = first_size(text, "hidden_size") or 1
    heads = first_size(text, "num_attention_heads") or 1
    widest = max(max(p.shape) for p in first_layer if len(p.shape) >= 2)
    vocabulary = int(text.vocab_size if table is None else table.shape[0])
    sizes = TextSizes(
        hidden=hidden,
        feed_forward=first_size(text, "intermediate_size", "n_inner") or widest,
        vocabulary=vocabulary,
        outputs=1 if task.traits.scores_sequences else vocabulary,
        heads=heads,
        key_value_heads=first_size(text, "num_key_value_heads") or heads,
        head_dim=first_size(text, "head_dim") or hidden // heads,
        gated=any("gate" in p.name for p in first_layer),
        dropout=max_dropout > 0,
    )
    tensor = tensor_parallel_styles(
        model, text.model_type if task.traits.has_images else hf_config.model_type, stack_path
    )
    tied = tuple(tuple(names) for names in parameter_aliases(model) if len(names) > 1)
    chosen = text_attention(model.config)
    traced = trace_model(model, probed.cut, probed.attention)  # last, as it replaces the parameters
    stack = [(f"{stack_path}.{index}", "decoder") for index in range(len(placed) - 2)]
    layers = [
        make_layer(title, kind, parameters, text, sizes, seen)
        for (title, kind), parameters, seen in zip(
            [("embedding", "embedding"), *stack, ("head", "head")],
            placed,
            traced.layers,
            strict=True,
        )
    ]
    return ModelGraph(
        model_type=hf_config.model_type,
        architecture=type(model).__name__,
        config=plain,
        config_hash=config_sha256(plain),
        hidden_size=sizes.hidden,
        feed_forward_size=sizes.feed_forward,
        vocabulary_size=sizes.vocabulary,
        attention_heads=sizes.heads,
        key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim,
        max_positions=first_size(text, "max_position_embeddings"),
        layers=tuple(layers),
        tied=tied,
        cut=probed.cut,
        attention_module=probed.attention,
        tensor_parallel_kind=tensor.kind,
        tensor_parallel_reason=tensor.reason,
        tensor_parallel_styles=tensor.styles,
        tensor_parallel_heads=tensor.heads,
        max_dropout=max_dropout,
        attention=chosen,
        packing=probed.packing,
        modules_run_per_image=probed.modules_run_per_image,
        context=traced.context,
    )


def _parameters_by_layer(
    model: PreTrainedModel, probed: ModelStructure
) -> list[list[Parameter]] | None:
    """Return the parameters of the embedding, each decoder layer, and the head; None where the tiny
    copy lacks some."""
    stack_path = probed.cut.stack
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    sides = probed.place(shapes)
    if sides is None:
        return None
    embedding, head = (
        [Parameter(name=name, shape=shapes[name]) for name in side] for side in sides
    )
    decoder: list[list[Parameter]] = [[] for _ in model.get_submodule(stack_path).children()]
    for name, shape in shapes.items():
        if name.startswith(stack_path + "."):
            number = int(name[len(stack_path) + 1 :].split(".")[0])
            decoder[number].append(Parameter(name=name, shape=shape))
    return [embedding, *decoder, head]


def _refuse_unsplittable(hf_config: PretrainedConfig, key: KeyPath) -> None:
    """Refuse what would build but not run, or not as the decoder-only stack that can be split."""
    wrong: list[tuple[str, str, str, str]] = []  # code, name, message, help
    if getattr(hf_config, "add_cross_attention", False):
        message = "add_cross_attention: True makes an encoder-decoder model, which cannot be split"
        wrong.append(
            ("SW2009", "add_cross_attention", message, "Set add_cross_attention to false.")
        )
    heads = first_size(hf_config, "num_attention_heads")
    key_value_heads = first_size(hf_config, "num_key_value_heads") or heads
    if heads and key_value_heads and heads % key_value_heads:
        message = (
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{key_value_heads}"
        )
        help = "Each key/value head serves the same number of query heads."
        wrong.append(("SW2007", "num_key_value_heads", message, help))
    if wrong:
        inline = key[-1] == "config"
        raise Refusal(
            *(
                Diagnostic(
                    code=code, message=message, help=help, key=(*key, name) if inline else key
                )
                for code, name, message, help in wrong
            )
        )


def check_attention(model: PreTrainedModel, hf_config: PretrainedConfig, attention: str) -> None:
    """Raise SW2008 where the model does not support the pinned attention implementation."""
    supported = {"auto", "eager"}
    text = text_config(model.config)
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    if all(part._supports_sdpa for part in parts if part is model or part.config is text):
        supported.add("sdpa")
    # Some types list the kernels that support them (attention sinks, for example).
    kernels = getattr(model, "_compatible_flash_implementations", None)
    if model._supports_flash_attn and (kernels is None or FLASH_ATTENTION_2 in kernels):
        supported.add(FLASH_ATTENTION_2)
    if attention not in supported:
        message = (
            f"attention {attention!r} is not available for model_type {hf_config.model_type!r}"
        )
        raise _no_attention(message, tuple(sorted(supported)))
