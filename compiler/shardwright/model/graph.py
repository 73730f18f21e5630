"""Stage 2: the recipe's `model` section -> ModelGraph, counted on the meta device (no weights, no memory).

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.cut import Cut
from shardwright.ir.json_value import JsonObject
from shardwright.ir.model_graph import Layer, ModelGraph, Parameter
from shardwright.ir.recipe import ModelSection
from shardwright.model.config import config_json, contradiction, read_config, resolve_config
from shardwright.model.families import FAMILIES, Family


def build_model_graph(section: ModelSection) -> ModelGraph:
    """Raises Refusal with SW2xxx where the model cannot be found, read, built or split."""
    config, key, inline = read_config(section)
    # One meta model per distinct configuration and process: `estimate` asks for the same one many times.
    return _graph(json.dumps(config, sort_keys=True), section.attention, key[-1] == "config" and inline)


@functools.lru_cache(maxsize=512)
def _graph(config_text: str, attention: str, inline: bool) -> ModelGraph:
    key = ("model", "config") if inline else ("model", "source")
    hf_config = resolve_config(json.loads(config_text), key, inline)
    family = FAMILIES[hf_config.model_type]
    _refuse_unsplittable(hf_config, key)
    try:
        with torch.device("meta"):
            # float32: the size of an element is the cost model's business, and half types need no support here.
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:
        raise Refusal(contradiction(error, key)) from None
    _check_attention(model, hf_config, attention)
    plain = config_json(hf_config, type(model).__name__)
    graph = _measure(model, hf_config, family, plain, attention)
    graph.verify()
    return graph


def _measure(
    model: PreTrainedModel, hf_config: PretrainedConfig, family: Family, plain: JsonObject, attention: str
) -> ModelGraph:
    base = model.base_model_prefix
    stack_path, stack = next((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    embedding: list[Parameter] = []
    head: list[Parameter] = []
    decoder: list[list[Parameter]] = [[] for _ in stack]
    for name, tensor in model.named_parameters():
        parameter = Parameter(name=name, shape=tuple(tensor.shape))
        if name.startswith(stack_path + "."):
            decoder[int(name[len(stack_path) + 1 :].split(".")[0])].append(parameter)
        elif any(decoder):
            head.append(parameter)  # modules are registered in the order they run
        else:
            embedding.append(parameter)
    output = model.get_output_embeddings().weight
    canonical = names[id(output)][0]
    if all(p.name != canonical for p in head):  # tied: the parameter is listed in both layers
        head.append(Parameter(name=canonical, shape=tuple(output.shape)))
    heads = hf_config.num_attention_heads
    hidden = hf_config.hidden_size
    head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
    key_value_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    first = {p.name[len(stack_path) + 3 :]: p.shape for p in decoder[0]}  # "mlp.up_proj.weight" -> shape
    feed_forward = max(max(shape) for name, shape in first.items() if name.startswith("mlp.") and len(shape) == 2)
    feed_forward = int(
        getattr(hf_config, "intermediate_size", None) or getattr(hf_config, "n_inner", None) or feed_forward
    )
    max_dropout = _largest_dropout(model)
    attention_elements = _attention_elements(heads, key_value_heads, head_dim)
    # Decoder layers of these families are alike: the module's own elements and the two layer-norm inputs.
    activations = attention_elements + 2 * hidden + _feed_forward_elements(hidden, feed_forward, family.gated)
    if max_dropout > 0:
        activations += hidden  # two dropout masks of one byte each, against two bytes an element
    layers = [
        Layer(
            name="embedding",
            kind="embedding",
            parameters=tuple(embedding),
            matmul_flops_per_token=0,
            attention_flops_per_token_per_position=0,
            activation_elements_per_token=0,
            attention_activation_elements_per_token=0,
            attention_matrix_elements_per_token_per_position=0,
        )
    ]
    for index, parameters in enumerate(decoder):
        layers.append(
            Layer(
                name=f"{stack_path}.{index}",
                kind="decoder",
                parameters=tuple(parameters),
                matmul_flops_per_token=2 * sum(p.numel for p in parameters if len(p.shape) == 2),
                attention_flops_per_token_per_position=4 * heads * head_dim,
                activation_elements_per_token=activations,
                attention_activation_elements_per_token=attention_elements,
                attention_matrix_elements_per_token_per_position=(5 * heads + 1) // 2,
            )
        )
    layers.append(
        Layer(
            name="head",
            kind="head",
            parameters=tuple(head),
            matmul_flops_per_token=2 * output.numel(),
            attention_flops_per_token_per_position=0,
            # The final norm's input and output; logits are the cost model's workspace.
            activation_elements_per_token=2 * hidden,
            attention_activation_elements_per_token=0,
            attention_matrix_elements_per_token_per_position=0,
        )
    )
    return ModelGraph(
        model_type=hf_config.model_type,
        architecture=type(model).__name__,
        config=plain,
        config_hash=hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(),
        hidden_size=hidden,
        feed_forward_size=feed_forward,
        vocabulary_size=output.shape[0],
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_positions=getattr(hf_config, "max_position_embeddings", None),
        layers=tuple(layers),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        cut=Cut(stack=stack_path, hidden_position=0, hidden_keyword=None, output_length=0),
        attention_module=family.attention_module,
        tensor_styles=_styles(model, family, base, decoder[0], stack_path),
        max_dropout=max_dropout,
        attention=model.config._attn_implementation if attention == "auto" else attention,
    )


def _largest_dropout(model: nn.Module) -> float:
    """Of the modules that are there: configs also name dropouts of heads that a causal LM does not have."""
    layers = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    attributes = [
        value
        for m in model.modules()
        for name, value in vars(m).items()
        if "dropout" in name and isinstance(value, float)
    ]
    return max((float(p) for p in (*layers, *attributes)), default=0.0)


def _attention_elements(heads: int, key_value_heads: int, head_dim: int) -> int:
    """Per token, inside the attention module: Q, K, V and the output projection's input.

    Korthikanti et al. (arXiv 2205.05198) section 4.1, with grouped keys and values, in elements of two bytes and
    without the S x S part (kept only by eager attention); the module's input is the norm's output, counted with it.
    """
    return (heads + 2 * key_value_heads) * head_dim + heads * head_dim


def _feed_forward_elements(hidden: int, feed_forward: int, gated: bool) -> int:
    """Per token: both norms' outputs (the inputs of attention and feed-forward) and the feed-forward's own tensors.

    Plain (arXiv 2205.05198): the activation's input and output. Gated: gate, up, the activated gate, the product.
    """
    return 2 * hidden + (4 if gated else 2) * feed_forward


def _styles(
    model: PreTrainedModel, family: Family, base: str, layer: list[Parameter], stack_path: str
) -> tuple[tuple[str, str], ...]:
    """Module path pattern -> style, the embedding and the head included. Error: SW2009, a matrix with no style."""
    own = family.tensor_styles if family.tensor_styles is not None else model.config.base_model_tp_plan
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    styles = [(f"{base}.{family.embedding}", "vocabulary_embedding")]
    styles += [(f"{base}.{pattern}", style) for pattern, style in own.items()]
    styles.append((head, "vocabulary_head"))
    patterns = {pattern for pattern, _ in styles}
    left = [
        p.name
        for p in layer
        if len(p.shape) > 1 and re.sub(r"\.\d+\.", ".*.", p.name.rsplit(".", 1)[0], count=1) not in patterns
    ]
    if left:
        raise Refusal(
            Diagnostic(
                code="SW2009",
                message=f"{left[0]!r} has no tensor-parallel style for model_type {model.config.model_type!r}",
                help="Turn the option that adds this module off; this version splits the plain decoder only.",
                key=("model",),
            )
        )
    return tuple(styles)


def _refuse_unsplittable(hf_config: PretrainedConfig, key: tuple[str, ...]) -> None:
    """What would build, but would not run, or not as the decoder-only stack that the runtime splits."""
    diagnostics: list[Diagnostic] = []

    def wrong(code: str, name: str, message: str, help_text: str) -> None:
        where = (*key, name) if key[-1] == "config" else key
        diagnostics.append(Diagnostic(code=code, message=message, help=help_text, key=where))

    if getattr(hf_config, "add_cross_attention", False):
        wrong(
            "SW2009",
            "add_cross_attention",
            "add_cross_attention: True makes an encoder-decoder model, which cannot be split",
            "Set add_cross_attention to false.",
        )
    heads = hf_config.num_attention_heads
    key_value_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    if heads % key_value_heads:
        wrong(
            "SW2007",
            "num_key_value_heads",
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_value_heads}",
            "Each key/value head serves the same number of query heads.",
        )
    if diagnostics:
        raise Refusal(*diagnostics)


def _check_attention(model: PreTrainedModel, hf_config: PretrainedConfig, attention: str) -> None:
    """A pinned implementation must be one that the class has; SW2008."""
    supported = {"auto", "eager"}
    if model._supports_sdpa:
        supported.add("sdpa")
    if model._supports_flash_attn:
        supported.add("flash_attention_2")
    if attention not in supported:
        raise Refusal(
            Diagnostic(
                code="SW2008",
                message=f"attention {attention!r} is not available for model_type {hf_config.model_type!r}",
                help="`auto` takes what transformers picks for the type.",
                key=("model", "attention"),
                valid=tuple(sorted(supported)),
            )
        )
