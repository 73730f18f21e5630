"""Megatron-Core's GPTModel of a Hugging Face configuration, and which of its rows are whose."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from shardwright.engines.megatron.families import FAMILIES, Family, Unsupported
from shardwright.engines.megatron.modules import Attention, Norm
from shardwright.engines.megatron.pieces import Heads, Source

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16.1 asks for it everywhere (megatron/core/transformer/moe/moe_utils.py:1192), and imports it where Transformer
    # Engine is.
    moe_utils.te_general_gemm = None
_EXPERT = re.compile(r"(?<=local_experts)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Of the Hugging Face model: fp32 frequencies (size / 2,)."""

    frequencies: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece:
    """`numel` elements from `start` of this rank's flattened shard of Hugging Face's parameter `name` are those from
    `own` of Megatron's flattened `parameter`."""

    name: str
    start: int
    parameter: nn.Parameter
    own: int
    numel: int


def family_of(config: Any) -> Family:
    """Raises Unsupported."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise Unsupported(f"model_type {config.model_type!r}: known are {', '.join(sorted(FAMILIES))}")
    return family


def rotary_of(model: nn.Module) -> Rotary | None:
    """The frequencies that Hugging Face computed: Megatron's own formula has numbers of one model in it
    (megatron/core/models/common/embeddings/rotary_pos_embedding.py:90). Raises Unsupported for positions that are no
    frequencies."""
    modules = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    if not modules:
        return None
    rotary: Any = modules[0]
    kind = getattr(rotary, "rope_type", "default")
    if len(modules) > 1 or not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        raise Unsupported(f"rope_type {kind}: its frequencies follow the length at hand")
    if getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise Unsupported(f"rope_type {kind}: it scales queries and keys by {rotary.attention_scaling}")
    return Rotary(frequencies=rotary.inv_freq.detach().float().clone())


def transformer_config(config: Any, **parallel: Any) -> TransformerConfig:
    """config: Hugging Face's. parallel: what the layout adds. Raises Unsupported."""
    settings = family_of(config).settings(config)
    fixed: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Every weight is read. Without any initialization they would not be marked as cut over tensor ranks, and the
        # gradient's norm would count the first rank's alone (megatron/core/tensor_parallel/layers.py,
        # _initialize_affine_weight_gpu).
        **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _untouched),
        # The loss is scaled by the labels of the global batch before its backward pass: nothing is left to divide.
        "calculate_per_token_loss": True,
    }
    return TransformerConfig(**{**fixed, **settings, **parallel})


def _untouched(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """Megatron's tables are cut evenly (megatron/core/tensor_parallel/layers.py): rows that no token has are added."""
    return math.ceil(vocabulary / tensor) * tensor


def build_model(
    config: Any,
    megatron: TransformerConfig,
    rotary: Rotary | None,
    *,
    length: int,
    first: bool = True,
    last: bool = True,
    virtual_stage: int | None = None,
) -> GPTModel:
    """One stage's part, without values. config: Hugging Face's; length: of a row. first, last: whether the stage has
    the embedding and the head."""
    family = family_of(config)
    spec = layer_spec(megatron)
    block = _block_spec(megatron, spec, virtual_stage)
    model = GPTModel(
        config=megatron,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(config.vocab_size, megatron.tensor_model_parallel_size),
        max_sequence_length=config.n_positions if family.learned_positions else length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        position_embedding_type="learned_absolute" if family.learned_positions else "rope",
        vp_stage=virtual_stage,
    )
    if rotary is not None:
        model.rotary_pos_emb.inv_freq = rotary.frequencies.to(torch.cuda.current_device())
    if first and family.scaled_embedding:
        scale = torch.tensor(config.hidden_size**0.5, dtype=megatron.params_dtype)
        model.embedding.register_forward_hook(lambda module, inputs, output: output * scale.to(output))
    return model


def build_chunks(
    config: Any, megatron: TransformerConfig, rotary: Rotary | None, *, length: int, pipeline_rank: int
) -> list[GPTModel]:
    """Those of one pipeline rank, in the order of its virtual stages."""
    last, chunks = megatron.pipeline_model_parallel_size - 1, megatron.virtual_pipeline_model_parallel_size
    return [
        build_model(
            config,
            megatron,
            rotary,
            length=length,
            first=pipeline_rank == 0 and number == 0,
            last=pipeline_rank == last and number == (chunks or 1) - 1,
            virtual_stage=number if chunks else None,
        )
        for number in range(chunks or 1)
    ]


def _block_spec(config: TransformerConfig, layer: ModuleSpec, virtual_stage: int | None) -> TransformerBlockSubmodules:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)


def pieces(config: Any, model: nn.Module, *, tensor_rank: int, tied: dict[str, str]) -> Iterator[ParameterPiece]:
    """Of all of the model's parameters, in order. tied: name -> the first name of the same tensor."""
    family = family_of(config)
    for path, parameter in model.named_parameters():
        prefix, source, expert = _source(family, model, path)
        rows = parameter.shape[0]
        if path in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = max(0, min(rows, config.vocab_size - tensor_rank * rows))  # padded behind the last token
        width = parameter[0].numel()
        for part in source(rows, _heads(model.config)):
            name = prefix + part.name
            yield ParameterPiece(
                name=tied.get(name, name),
                start=(part.theirs + expert * rows) * width,
                parameter=parameter,
                own=part.own * width,
                numel=part.count * width,
            )


def _source(family: Family, model: Any, path: str) -> tuple[str, Source, int]:
    """(what stands before Hugging Face's names, where the rows come from, the expert's number)."""
    if not path.startswith("decoder.layers."):
        return "", family.outside[path], 0
    local, leaf = path.removeprefix("decoder.layers.").split(".", 1)
    number = model.decoder.layers[int(local)].layer_number - 1
    expert = _EXPERT.search(leaf)
    leaf = _EXPERT.sub(".N.", leaf)
    return f"{family.stack}.{number}.", family.layer[leaf], int(expert[1]) if expert else 0


def _heads(config: Any) -> Heads:
    ranks = config.tensor_model_parallel_size
    return Heads(
        query=config.num_attention_heads // ranks, groups=config.num_query_groups // ranks, size=config.kv_channels
    )


@torch.no_grad()
def fill(found: Iterable[ParameterPiece], shard: Any) -> None:
    """shard: name -> this rank's shard of it, from where the weights are. Rows behind the last token are zero."""
    name, values = None, torch.empty(0)
    empty: set[int] = set()
    for piece in found:
        flat = piece.parameter.data.view(-1)
        if id(piece.parameter) not in empty:
            flat.zero_()
            empty.add(id(piece.parameter))
        if piece.name != name:
            name, values = piece.name, shard(piece.name).reshape(-1)
        flat[piece.own : piece.own + piece.numel].copy_(values[piece.start : piece.start + piece.numel])
