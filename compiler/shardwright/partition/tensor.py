"""Stage 5b: modules -> tensor-parallel styles, with every parameter's shard sizes.

Styles cut dimensions of Hugging Face's own layout. nn.Linear's weight is (out, in): colwise cuts 0, rowwise cuts 1.
transformers' Conv1D (GPT-2) holds (in, out): colwise cuts 1, rowwise cuts 0. A column bias is cut with its output
dimension; a row bias is whole on every rank, added once after the all-reduce.
"""

from __future__ import annotations

import re

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.model_graph import ModelGraph, Parameter
from shardwright.ir.partition import ModuleSplit, ParameterSplit, TensorParallelMap

# Model types whose linears are Conv1D, weight (in, out); everything else is nn.Linear, weight (out, in).
TRANSPOSED_LINEAR_TYPES = ("gpt2",)
QKV_BLOCKS = 3  # fused query, key, value of equal width


def shard_sizes(total: int, degree: int) -> tuple[int, ...]:
    """Near-even shards, the first `total % degree` ranks one larger.

    As DeepSpeed's get_shard_size_list with no head count and a grain of one (module_inject/tp_shard.py).
    """
    return tuple(total // degree + (1 if rank < total % degree else 0) for rank in range(degree))


def tensor_parallel_map(graph: ModelGraph, degree: int) -> TensorParallelMap:
    """Every module that owns parameters, in model order, each parameter once.

    A tied head comes with no parameters: its tensor is listed under the embedding. Uneven vocabulary shards are
    allowed; any other dimension must divide (errors: SW3103, SW3104, SW3105, those that the rules know, by dimension).
    """
    styles = dict(graph.tensor_styles)
    transposed = graph.model_type in TRANSPOSED_LINEAR_TYPES
    modules: dict[str, list[Parameter]] = {}
    seen: set[str] = set()
    for layer in graph.layers:
        for parameter in layer.parameters:
            if parameter.name not in seen:
                seen.add(parameter.name)
                modules.setdefault(parameter.name.rpartition(".")[0], []).append(parameter)
    splits: list[ModuleSplit] = []
    uneven: list[Diagnostic] = []
    for module, parameters in modules.items():
        style = styles.get(module_pattern(module), "replicated")
        cut = tuple(split_parameter(p, style, degree, transposed) for p in parameters)
        splits.append(ModuleSplit(module=module, style=style, parameters=cut))
        if not style.startswith("vocabulary"):
            uneven += [_uneven(p, degree) for p in cut if len(set(p.sizes)) > 1]
    if uneven:
        raise Refusal(uneven[0])  # one cause (the degree), the same in every layer
    head = next((name for name, style in graph.tensor_styles if style == "vocabulary_head"), None)
    if head is not None and head not in modules:
        splits.append(ModuleSplit(module=head, style="vocabulary_head", parameters=()))
    decoder = {p.name for layer in graph.layers if layer.kind == "decoder" for p in layer.parameters}
    matrices = [p for m in splits for p in m.parameters if p.name in decoder and len(p.shape) == 2]
    total = sum(_numel(p.shape) for p in matrices)
    sharded = sum(_numel(p.shape) for p in matrices if p.dimension is not None)
    result = TensorParallelMap(degree=degree, modules=tuple(splits), sharded_fraction=sharded / total)
    result.verify()
    return result


def split_parameter(parameter: Parameter, style: str, degree: int, transposed: bool) -> ParameterSplit:
    """One parameter of a module of this style, cut over `degree` ranks; near-evenly where it does not divide."""
    dimension = _dimension(len(parameter.shape), style, transposed) if degree > 1 else None
    if dimension is None:
        return ParameterSplit(name=parameter.name, shape=parameter.shape, dimension=None, blocks=(), sizes=())
    full = parameter.shape[dimension]
    blocks = (full // QKV_BLOCKS,) * QKV_BLOCKS if style == "packed_colwise" else (full,)
    parts = [shard_sizes(block, degree) for block in blocks]
    sizes = tuple(sum(sizes) for sizes in zip(*parts, strict=True))
    return ParameterSplit(name=parameter.name, shape=parameter.shape, dimension=dimension, blocks=blocks, sizes=sizes)


def _dimension(dimensions: int, style: str, transposed: bool) -> int | None:
    """Which dimension the style cuts; None = whole on every rank."""
    if style.startswith("replicated") or (style.startswith("rowwise") and dimensions == 1):
        return None
    if dimensions == 1 or style.startswith("vocabulary"):
        return 0
    output = 1 if transposed else 0
    return output if style in ("colwise", "packed_colwise", "colwise_gather_output") else 1 - output


def _uneven(split: ParameterSplit, degree: int) -> Diagnostic:
    assert split.dimension is not None
    attention = "attn" in split.name
    return Diagnostic(
        code="SW3103" if attention else "SW3105",
        message=f"tensor {degree} does not divide dimension {split.dimension} of {split.name} "
        f"({split.shape[split.dimension]})",
        help="Choose a tensor degree that divides the attention heads, the key/value heads and the feed-forward size.",
        key=("parallelism", "tensor"),
    )


def module_pattern(module: str) -> str:
    """ "model.layers.3.mlp.up_proj" -> "model.layers.*.mlp.up_proj"."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module, count=1)


def _numel(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
