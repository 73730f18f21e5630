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

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal
from shardwright.hf.probe import Probed
from shardwright.ir.json_value import JsonObject
from shardwright.ir.model_graph import Layer, ModelGraph, Parameter
from shardwright.ir.recipe import ModelSection
from shardwright.model.config import config_json, contradiction, read_config, resolve_config
from shardwright.model.families import TENSOR_STYLES
from shardwright.model.probed import probe_config, uncuttable

_CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def build_model_graph(section: ModelSection) -> ModelGraph:
    """Raises Refusal with SW2xxx where the model cannot be found, read, built or split."""
    config, key, inline = read_config(section)
    # One meta model per distinct configuration and process: `estimate` asks for the same one many times.
    return _graph(json.dumps(config, sort_keys=True), section.attention, key[-1] == "config" and inline)


@functools.lru_cache(maxsize=512)
def _graph(config_text: str, attention: str, inline: bool) -> ModelGraph:
    key = ("model", "config") if inline else ("model", "source")
    hf_config = resolve_config(json.loads(config_text), key, inline)
    _refuse_unsplittable(hf_config, key)
    try:
        with torch.device("meta"):
            # float32: the size of an element is the cost model's business, and half types need no support here.
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:
        raise Refusal(contradiction(error, key)) from None
    _check_attention(model, hf_config, attention)
    plain = config_json(hf_config, type(model).__name__)
    probed = probe_config(hf_config, attention, key)
    graph = _measure(model, hf_config, probed, plain, attention, key)
    graph.verify()
    return graph


def _measure(
    model: PreTrainedModel, hf_config: PretrainedConfig, probed: Probed, plain: JsonObject, attention: str, key: KeyPath
) -> ModelGraph:
    stack_path = probed.cut.stack
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    known = {*probed.embedding, *probed.head}
    unplaced = [n for n in shapes if not n.startswith(stack_path + ".") and n not in known]
    if unplaced or not known <= shapes.keys():
        raise Refusal(uncuttable(hf_config, f"its tiny copy has no {', '.join(unplaced) or 'such parameters'}", key))
    embedding = [Parameter(name=name, shape=shapes[name]) for name in probed.embedding]
    head = [Parameter(name=name, shape=shapes[name]) for name in probed.head]
    decoder: list[list[Parameter]] = [[] for _ in model.get_submodule(stack_path).children()]
    for name, shape in shapes.items():
        if name.startswith(stack_path + "."):
            number = int(name[len(stack_path) + 1 :].split(".")[0])
            decoder[number].append(Parameter(name=name, shape=shape))
    text = hf_config.get_text_config()
    output = model.get_output_embeddings()
    vocabulary = int(output.weight.shape[0] if output is not None else text.vocab_size)
    hidden = _size(text, "hidden_size") or 1
    heads = _size(text, "num_attention_heads") or 1
    head_dim = _size(text, "head_dim") or hidden // heads
    key_value_heads = _size(text, "num_key_value_heads") or heads
    widest = max(max(p.shape) for p in decoder[0] if len(p.shape) >= 2)
    feed_forward = _size(text, "intermediate_size", "n_inner") or widest
    gated = any("gate" in p.name for p in decoder[0])
    max_dropout = _largest_dropout(model)
    attention_elements = _attention_elements(heads, key_value_heads, head_dim)
    # Decoder layers of these families are alike: the module's own elements and the two layer-norm inputs.
    activations = attention_elements + 2 * hidden + _feed_forward_elements(hidden, feed_forward, gated)
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
                matmul_flops_per_token=sum(_matmul_flops(p, text) for p in parameters),
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
            matmul_flops_per_token=2 * vocabulary * hidden,
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
        vocabulary_size=vocabulary,
        attention_heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_positions=_size(text, "max_position_embeddings"),
        layers=tuple(layers),
        tied=tuple(tuple(group) for group in names.values() if len(group) > 1),
        cut=probed.cut,
        attention_module=probed.attention,
        tensor_styles=_styles(model, decoder[0]) if hf_config.model_type in TENSOR_STYLES else (),
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


def _size(config: PretrainedConfig, *names: str) -> int | None:
    """The first of these that the configuration has as one number; some types have one a layer, or none."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # transformers refuses to answer for an attribute that varies by layer
            continue
        if isinstance(value, int) and value:
            return value
    return None


def _matmul_flops(parameter: Parameter, text: PretrainedConfig) -> int:
    """Forward, per token. A stack of experts' matrices works on the experts that a token is routed to only."""
    if len(parameter.shape) < 2:
        return 0
    if len(parameter.shape) == 3:
        chosen = _size(text, *_CHOSEN_EXPERTS) or parameter.shape[0]
        return 2 * parameter.numel * min(chosen, parameter.shape[0]) // parameter.shape[0]
    return 2 * parameter.numel


def _styles(model: PreTrainedModel, layer: list[Parameter]) -> tuple[tuple[str, str], ...]:
    """Module path pattern -> style, the embedding and the head included; () where they would not cut all of it."""
    base = model.base_model_prefix
    own = TENSOR_STYLES[model.config.model_type] or model.config.base_model_tp_plan
    paths = {id(module): name for name, module in model.named_modules()}
    table, head = paths[id(model.get_input_embeddings())], paths[id(model.get_output_embeddings())]
    styles = [(table, "vocabulary_embedding")]
    styles += [(f"{base}.{pattern}", style) for pattern, style in own.items() if style != "embedding_rowwise"]
    styles.append((head, "vocabulary_head"))
    return () if _misses(dict(styles), layer) else tuple(styles)


def _misses(styles: dict[str, str], layer: list[Parameter]) -> bool:
    """Whether the styles leave out what they should not: a matrix, or a small parameter that works on cut features
    (a norm over one rank's heads, a learned activation), whose gradient would be one rank's share."""
    inside_cut = {pattern.rpartition(".")[0] + "." for pattern, style in styles.items() if style == "colwise"}
    for parameter in layer:
        module = re.sub(r"\.\d+\.", ".*.", parameter.name.rsplit(".", 1)[0] + ".", count=1)[:-1]
        if module not in styles and (len(parameter.shape) > 1 or any(module.startswith(p) for p in inside_cut)):
            return True
    return False


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
    heads = _size(hf_config, "num_attention_heads")
    key_value_heads = _size(hf_config, "num_key_value_heads") or heads
    if heads and key_value_heads and heads % key_value_heads:
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
