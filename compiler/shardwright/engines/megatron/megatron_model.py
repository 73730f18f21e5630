"""Build Megatron-Core's model of a Hugging Face configuration, and map its rows to HF's."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from shardwright.engines.megatron.hybrid_model import (
    LAYERS_PER_DECODER,
    HybridModel,
    hybrid_arguments,
    hybrid_model_obstacle,
    layer_has_experts,
    layer_pattern,
    stack_spec,
)
from shardwright.engines.megatron.megatron_layers import (
    InterleavedGateUpLinear,
    LatentAttention,
    PlainQueryAttention,
    TorchCoreAttention,
    TorchNorm,
    TransposedExpertLinear,
)
from shardwright.engines.megatron.megatron_model_configs import Unsupported
from shardwright.engines.megatron.megatron_weight_mapping import (
    MODEL_MAPPINGS,
    ModelMapping,
    RankHeads,
    RowSource,
)
from shardwright.engines.megatron.transformer_engine_layers import local_layer_name

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16.1 reads it always (megatron/core/transformer/moe/moe_utils.py:1192), and imports it only
    # with Transformer Engine.
    moe_utils.te_general_gemm = None
if not HAVE_TE:
    # 0.16.1 checks a module against a class that is missing then (multi_latent_attention.py:185).
    multi_latent_attention.HAVE_TE = False
    # 0.16.1 takes every checkpoint that discards its output for one in FP8
    # (megatron/core/tensor_parallel/random.py:636), and asks Transformer Engine for its state.
    # Without it nothing is in FP8.
    _checkpoint_init = CheckpointWithoutOutput.__init__

    def _checkpoint_without_fp8(self: Any, fp8: object = None) -> None:
        _checkpoint_init(self, None)

    CheckpointWithoutOutput.__init__ = _checkpoint_without_fp8
_EXPERT = re.compile(r"(?<=local_experts)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryFrequencies:
    """Hold the Hugging Face model's rotary frequencies.

    frequencies: fp32, (size / 2,)
    scaling: multiplies queries and keys after the rotation
    """

    frequencies: torch.Tensor
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRange:
    """Map elements of Megatron's parameter to those of Hugging Face's.

    name: Hugging Face's parameter
    start: first element in this rank's flattened shard of it
    parameter: Megatron's; a buffer where Hugging Face has one
    own: first element in Megatron's flattened parameter
    numel: number of elements
    """

    name: str
    start: int
    parameter: torch.Tensor
    own: int
    numel: int

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.parameter, nn.Parameter)


def weight_mapping(config: Any) -> ModelMapping:
    """Return the model type's mapping. Raises Unsupported."""
    family = MODEL_MAPPINGS.get(config.model_type)
    if family is None:
        raise Unsupported(
            f"model_type {config.model_type!r} is not one of {', '.join(sorted(MODEL_MAPPINGS))}"
        )
    return family


def rotary_frequencies(model: nn.Module) -> RotaryFrequencies | None:
    """Return the frequencies that Hugging Face computed.

    Megatron's formula has constants of one model
    (megatron/core/models/common/embeddings/rotary_pos_embedding.py:90). Raises Unsupported for
    frequencies that depend on the length.
    """
    modules = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    if not modules:
        return None
    rotary: Any = modules[0]
    kind = getattr(rotary, "rope_type", "default")
    if len(modules) > 1 or not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        raise Unsupported(
            f"rope_type {kind} has frequencies that depend on the sequence length or the layer"
        )
    scaling = float(getattr(rotary, "attention_scaling", 1.0))
    return RotaryFrequencies(frequencies=rotary.inv_freq.detach().float().clone(), scaling=scaling)


def transformer_config(config: Any, **parallel: Any) -> TransformerConfig:
    """Build the TransformerConfig, whose is_hybrid_model says which model build_model builds.

    config: Hugging Face's; parallel: what the layout adds

    Raises Unsupported.
    """
    settings = weight_mapping(config).settings(config)
    fixed: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Every weight is loaded. Without an initialization they would not be marked as sharded over
        # tensor ranks, and the gradient norm would count the first rank's alone
        # (megatron/core/tensor_parallel/layers.py, _initialize_affine_weight_gpu).
        **dict.fromkeys(
            ("init_method", "output_layer_init_method", "embedding_init_method"),
            lambda parameter: parameter,
        ),
        # The loss is divided by the labels of the global batch before its backward pass.
        "calculate_per_token_loss": True,
    }
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    arguments = {**fixed, **settings, **parallel}
    return kind(**(arguments if hybrid_model_obstacle(arguments) else hybrid_arguments(arguments)))


def layer_spec(
    config: TransformerConfig,
    family: ModelMapping,
    *,
    experts: bool,
    transformer_engine: bool = False,
) -> ModuleSpec:
    """Return the module spec of a decoder layer.

    experts: the layer is a mixture of experts
    """
    if transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if experts else None,
            moe_grouped_gemm=experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        if config.multi_latent_attention:
            spec.submodules.self_attention.module = PlainQueryAttention
        return spec
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        attention.kv_layernorm = TorchNorm
        # 0.19 refuses a norm of queries that have no low rank (mla_qk_norm_config.py:259).
        attention.q_layernorm = TorchNorm if config.q_lora_rank else IdentityOp
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    if experts and family.has_transposed_experts:
        linears = _submodules(_submodules(layer.mlp).experts)
        linears.linear_fc1, linears.linear_fc2 = InterleavedGateUpLinear, TransposedExpertLinear
    return spec


def _submodules(spec: Any) -> Any:
    """Return a spec's submodules; 0.19 has partial functions where 0.16 has specs."""
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Return the vocabulary size that divides over tensor ranks.

    Megatron splits its tables evenly (megatron/core/tensor_parallel/layers.py); the last rows
    belong to no token.
    """
    return math.ceil(vocabulary / tensor) * tensor


def build_model(
    config: Any,
    megatron: TransformerConfig,
    rotary: RotaryFrequencies | None,
    *,
    length: int,
    first: bool = True,
    last: bool = True,
    virtual_stage: int | None = None,
    transformer_engine: bool = False,
) -> Any:
    """Build one stage's part of the model, a HybridModel or a GPTModel, without values.

    config: Hugging Face's
    length: tokens of a sequence
    first, last: the stage has the embedding, the head
    """
    family = weight_mapping(config)
    if rotary is not None and rotary.scaling != 1.0:
        # A scaling of queries and keys is one of the scores, where rotation covers all of a head.
        if 2 * len(rotary.frequencies) != megatron.kv_channels or megatron.multi_latent_attention:
            raise Unsupported(
                f"the rotary scaling {rotary.scaling:.6g} applies to a part of each query and key"
            )
        megatron.softmax_scale = megatron.kv_channels**-0.5 * rotary.scaling**2
    arguments = {
        "config": megatron,
        "vocab_size": padded_vocabulary(config.vocab_size, megatron.tensor_model_parallel_size),
        "max_sequence_length": config.n_positions if family.learned_positions else length,
        "pre_process": first,
        "post_process": last,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        "position_embedding_type": "learned_absolute" if family.learned_positions else "rope",
        "vp_stage": virtual_stage,
    }
    model: Any
    if megatron.is_hybrid_model:
        model = HybridModel(
            hybrid_stack_spec=_stack_spec(megatron, family, transformer_engine),
            hybrid_layer_pattern=layer_pattern(megatron),
            **arguments,
        )
        if last and not transformer_engine:
            model.decoder.post_layer_norm = True
            model.decoder.final_norm = TorchNorm(
                megatron, megatron.hidden_size, megatron.layernorm_epsilon
            )
    else:
        block = _block_spec(megatron, family, virtual_stage, transformer_engine)
        model = GPTModel(transformer_layer_spec=block, **arguments)
    if rotary is not None:
        for module in model.modules():
            if getattr(module, "rotary_pos_emb", None) is not None:
                module.rotary_pos_emb.inv_freq = rotary.frequencies.to(torch.cuda.current_device())
    own_tensor = megatron.expert_tensor_parallel_size != megatron.tensor_model_parallel_size
    if megatron.expert_model_parallel_size > 1 or own_tensor:
        # Experts' gradients are summed over the ranks that hold the same experts. Megatron marks
        # them where there are expert ranks (megatron/core/tensor_parallel/layers.py:886); with
        # expert-tensor ranks alone, tensor ranks hold the same experts.
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False
    if first and family.scaled_embedding:
        scale = torch.tensor(config.hidden_size**0.5, dtype=megatron.params_dtype)
        model.embedding.register_forward_hook(
            lambda module, inputs, output: output * scale.to(output)
        )
    return model


class _DropRowGradient(torch.autograd.Function):
    """Return a table (rows, hidden) unchanged, with no gradient for one row."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, row: int) -> torch.Tensor:
        ctx.row = row
        return table.view_as(table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        gradient[ctx.row] = 0
        return gradient, None


def freeze_padding_row(model: Any, embedding: nn.Module) -> None:
    """Let lookups of the padding token train nothing, as in torch.nn.Embedding.

    embedding: Hugging Face's input embedding, which has padding_idx

    A tied head's part of the row's gradient stays.
    """
    padding, table = getattr(embedding, "padding_idx", None), getattr(model, "embedding", None)
    if padding is None or table is None:
        return
    words = table.word_embeddings
    row, inner = padding - words.vocab_start_index, words.forward
    if not 0 <= row < len(words.weight):
        return

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = words._parameters.pop("weight")
        drop_gradient: Callable[..., torch.Tensor] = _DropRowGradient.apply
        words.weight = drop_gradient(weight, row)
        try:
            return inner(ids)  # type: ignore[no-any-return]
        finally:
            del words.weight
            words._parameters["weight"] = weight

    words.forward = forward


def build_model_chunks(
    config: Any,
    megatron: TransformerConfig,
    rotary: RotaryFrequencies | None,
    *,
    length: int,
    pipeline_rank: int,
    transformer_engine: bool = False,
) -> list[Any]:
    """Build the model chunks of one pipeline rank, in the order of its virtual stages."""
    last, chunks = (
        megatron.pipeline_model_parallel_size - 1,
        megatron.virtual_pipeline_model_parallel_size,
    )
    return [
        build_model(
            config,
            megatron,
            rotary,
            length=length,
            first=pipeline_rank == 0 and number == 0,
            last=pipeline_rank == last and number == (chunks or 1) - 1,
            virtual_stage=number if chunks else None,
            transformer_engine=transformer_engine,
        )
        for number in range(chunks or 1)
    ]


def _block_spec(
    config: TransformerConfig,
    family: ModelMapping,
    virtual_stage: int | None,
    transformer_engine: bool,
) -> TransformerBlockSubmodules:
    """Return the specs of a stage's layers, some of which have experts."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    count, layout = (
        get_num_layers_to_build(config, vp_stage=virtual_stage),
        config.pipeline_model_parallel_layout,
    )
    own = (
        layout.get_layer_id_list(LayerType.decoder, virtual_stage)
        if layout is not None
        else range(count)
    )
    which = [layer_has_experts(config, number) for number in own]
    specs = _layer_specs(config, family, which, transformer_engine)
    norm = TENorm if transformer_engine else TorchNorm
    return TransformerBlockSubmodules(
        layer_specs=[specs[experts] for experts in which], layer_norm=norm
    )


def _layer_specs(
    config: TransformerConfig,
    family: ModelMapping,
    which: Iterable[bool],
    transformer_engine: bool,
) -> dict[bool, ModuleSpec]:
    """Return the specs of the layers that have experts, and of those that have none."""
    return {
        experts: layer_spec(config, family, experts=experts, transformer_engine=transformer_engine)
        for experts in set(which)
    }


def _stack_spec(
    config: TransformerConfig, family: ModelMapping, transformer_engine: bool
) -> ModuleSpec:
    """Return the spec of HybridModel's stack, the same for all stages."""
    which = [layer_has_experts(config, number) for number in range(config.num_layers)]
    specs = _layer_specs(config, family, which, transformer_engine)
    return stack_spec(specs, own_norm=not transformer_engine)


def low_precision_parameters(
    megatron: TransformerConfig, chunks: Iterable[Any]
) -> frozenset[nn.Parameter]:
    """Return the weights whose products run under Transformer Engine's recipe: those of its linears
    in the layers that do not stay in bf16."""
    if megatron.fp8 is None and megatron.fp4 is None:
        return frozenset()
    return frozenset(
        parameter
        for chunk in chunks
        for layer in chunk.decoder.layers
        if not is_first_last_bf16_layer(megatron, layer.layer_number - 1)
        for module in layer.modules()
        if type(module).__module__ == TENorm.__module__
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    )


def parameter_ranges(
    config: Any, model: nn.Module, *, tensor_rank: int, tied: dict[str, str]
) -> Iterator[ParameterRange]:
    """Yield the ranges of all parameters, in order, then of buffers that Hugging Face has too.

    tied: name -> the first name of the same tensor
    """
    family = weight_mapping(config)
    buffers = [
        (path, buffer)
        for path, buffer in model.named_buffers()
        if path.startswith("decoder.layers.") and path.split(".", 3)[3] in family.layer
    ]
    own = cast(TransformerConfig, model.config)
    ranks = own.tensor_model_parallel_size
    heads = RankHeads(
        query=own.num_attention_heads // ranks,
        groups=own.num_query_groups // ranks,
        size=own.kv_channels,
    )
    for path, parameter in (*model.named_parameters(), *buffers):
        prefix, source, expert = _source(family, model, path)
        rows = parameter.shape[0]
        if path in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = max(
                0, min(rows, config.vocab_size - tensor_rank * rows)
            )  # padded behind the last token
        width = parameter[0].numel()
        for part in source(rows, heads):
            name = prefix + part.name
            yield ParameterRange(
                name=tied.get(name, name),
                start=(part.hf_start + expert * rows) * width,
                parameter=parameter,
                own=part.own * width,
                numel=part.count * width,
            )


def _source(family: ModelMapping, model: Any, path: str) -> tuple[str, RowSource, int]:
    """Return (prefix of Hugging Face's names, source of the rows, the expert's number)."""
    if not path.startswith("decoder.layers."):
        path = path.replace("decoder.final_norm.", "decoder.final_layernorm.")  # HybridModel's
        return "", family.non_layer_weights[path], 0
    local, leaf = path.removeprefix("decoder.layers.").split(".", 1)
    leaf = local_layer_name(leaf)
    number = model.decoder.layers[int(local)].layer_number - 1
    if model.config.is_hybrid_model:
        number //= LAYERS_PER_DECODER
    expert = _EXPERT.search(leaf)
    leaf = _EXPERT.sub(".N.", leaf)
    return f"{family.stack}.{number}.", family.layer[leaf], int(expert[1]) if expert else 0


@torch.no_grad()
def zero_padding(found: Iterable[ParameterRange]) -> None:
    """Zero the parameters that have rows behind the last token.

    Neither weights nor a checkpoint has values for these rows, and no token is one of them. Yet the
    head multiplies by them, so a NaN in memory that was never written is one in every gradient.
    """
    sizes = Counter[torch.Tensor]()
    for piece in found:
        sizes[piece.parameter] += piece.numel
    for parameter, numel in sizes.items():
        if numel < parameter.numel():
            parameter.zero_()


@torch.no_grad()
def load_parameter_ranges(found: Iterable[ParameterRange], shard: Any) -> None:
    """Copy Hugging Face's values into the ranges.

    shard: name -> this rank's shard, where the weights are
    """
    name, values = None, torch.empty(0)
    for piece in found:
        if piece.name != name:
            name, values = piece.name, shard(piece.name).reshape(-1)
        piece.parameter.data.view(-1)[piece.own : piece.own + piece.numel].copy_(
            values[piece.start : piece.start + piece.numel]
        )
