"""Compare a model's weight files with its configuration, by names and shapes, before a run starts.

Only headers are read. `check_headers` needs no model and no torch (for `check`); `check_weights`
compares with the model itself (for `compile`).
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, found
from shardwright.models.config_schema import TIED
from shardwright.models.model_files import (
    DEQUANTIZED_METHODS,
    SINGLE,
    read_weight_index,
    weight_file_names,
    weight_map,
)
from shardwright.models.model_graph import ModelGraph
from shardwright.utils.file_io import parse_json
from shardwright.utils.json_values import JsonObject

if TYPE_CHECKING:
    import numpy as np

# Headers of safetensors files: names, types, shapes and offsets. No torch, and no tensor is loaded.


FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of a tensor that can be trained."""
MOST_HEADER_BYTES = 100 * 2**20
"""safetensors' own limit."""
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Describe one stored tensor.

    start, stop: offsets in the file (bytes).
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHeaders:
    """Hold the headers of a folder's weight files.

    tensors: by the names in the files.
    problem: how the files contradict each other or their index, "" where they do not.
    total_size: the index's count of bytes, None where there is none.
    """

    folder: Path
    tensors: Mapping[str, TensorHeader]
    problem: str
    total_size: int | None

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.stop - tensor.start for tensor in self.tensors.values())


def read_headers(folder: Path) -> WeightHeaders:
    """Read the headers. Raises OSError and ValueError for a file that is missing, truncated or not
    safetensors."""
    tensors: dict[str, TensorHeader] = {}
    problems: list[str] = []
    for file in weight_file_names(folder):
        for name, tensor in _read_header(folder, file):
            if name in tensors:
                problems.append(f"{name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    total = None
    if not (folder / SINGLE).exists():
        for name, file in weight_map(folder).items():
            if name not in tensors:
                problems.append(f"the index names {name}, and {file} does not hold it")
        metadata = read_weight_index(folder).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = size if isinstance(size, int) and not isinstance(size, bool) else None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    problem = f"{problems[0]}{more}" if problems else ""
    return WeightHeaders(folder=folder, tensors=tensors, problem=problem, total_size=total)


def same_values(headers: WeightHeaders, first: str, second: str) -> bool:
    """Return whether two tensors hold the same numbers, as torch.equal (NaN differs from itself).

    Reads block by block up to the first difference.
    """
    import numpy as np  # here: `check` reads headers only, and must start fast

    a, b = headers.tensors[first], headers.tensors[second]
    if a.shape != b.shape or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    with open(headers.folder / a.file, "rb") as left, open(headers.folder / b.file, "rb") as right:
        return all(
            np.array_equal(x, y) for x, y in zip(_values(left, a), _values(right, b), strict=True)
        )


def _values(file: Any, tensor: TensorHeader) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    """Yield a tensor as float64 blocks of equal size. bf16 is the upper half of an fp32 number."""
    import numpy as np

    width = {"F64": 8, "F32": 4}.get(tensor.dtype, 2)
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    file.seek(tensor.start)
    left, elements = (tensor.stop - tensor.start) // width, _BLOCK_BYTES // 8
    while left > 0:
        count = min(left, elements)
        block = np.frombuffer(file.read(count * width), dtype=kinds[tensor.dtype])
        if tensor.dtype == "BF16":
            block = (block.astype(np.uint32) << 16).view(np.float32)
        yield block.astype(np.float64)
        left -= count


def _read_header(folder: Path, file: str) -> Iterator[tuple[str, TensorHeader]]:
    path = folder / file
    with open(path, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file} is no safetensors file, or was cut off")
        header = parse_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} has no safetensors header")
    for name, entry in header.items():
        if name != "__metadata__":
            begin = 8 + length
            try:
                fields = cast("dict[str, Any]", entry)
                start, stop = (begin + int(at) for at in fields["data_offsets"])
                shape = tuple(int(length) for length in fields["shape"])
                dtype = str(fields["dtype"])
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{file}: the header's entry of {name} cannot be read") from None
            if not begin <= start <= stop <= size:
                raise ValueError(f"{file} was cut off: {name} ends behind its end")
            yield name, TensorHeader(file=file, dtype=dtype, shape=shape, start=start, stop=stop)


_SOURCE: KeyPath = ("model", "source")
_WEIGHTS: KeyPath = ("model", "weights")
FEW = 3
"""Number of tensors that a message names before it counts the rest."""

_QUANTISED_PARTS = re.compile(
    r"(_scale_inv|\.scale_inv|_blocks|_scales|\.qweight|\.qzeros|\.g_idx|weight_packed|weight_scale(_2)?|"
    r"\.absmax|\.quant_map|\.quant_state\.\S+|\.SCB)$"
)
"""Ends of tensor names that FP8, MXFP4, GPTQ, AWQ, NVFP4, compressed-tensors and bitsandbytes store
beside weights."""
_FOREIGN = (
    "_orig_mod.",
    "module.",
    "base_model.model.",
    "model._orig_mod.",
    "_fsdp_wrapped_module.",
    "_forward_module.",
)
"""Prefixes that torch.compile, DataParallel, peft, FSDP and DeepSpeed put before a name."""
_HEADS, _EMBEDDINGS = (
    ("lm_head.weight", "embed_out.weight"),
    ("embed_tokens.weight", "wte.weight", "embed_in.weight"),
)
_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|position_ids|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$"
)
"""Buffers that older versions of transformers stored; the class computes them."""
_VISION = re.compile(
    r"(^|\.)(visual|vision\w*|image_newline|multi_modal_projector|mm_projector|audio\w*|sound\w*)(\.|$)"
)
_MTP = re.compile(r"(^|[._])(mtp|nextn|eh_proj|enorm|hnorm|shared_head)([._]|$)")


def list_names(names: Sequence[str]) -> str:
    """List the first few names and count the rest."""
    shown = ", ".join(names[:FEW])
    return f"{shown} and {len(names) - FEW} more" if len(names) > FEW else shown


def count_tensors(number: int) -> str:
    return f"{number:,} tensor{'' if number == 1 else 's'}"


def check_headers(folder: Path, config: JsonObject, *, tied: bool) -> tuple[Diagnostic, ...]:
    """Check the files against themselves; report nothing where they cannot be read (SW1913 does).

    tied: whether the head is the embedding by this configuration.
    """
    try:
        headers = read_headers(folder)
    except (OSError, ValueError):
        return ()
    wrong = [*_contradiction(headers), *_quantised(headers, config), *_foreign(headers)]
    heads = [name for name in headers.tensors if name.endswith(_HEADS)]
    embeddings = [name for name in headers.tensors if name.endswith(_EMBEDDINGS)]
    is_one_pair = not wrong and tied and len(heads) == len(embeddings) == 1
    if is_one_pair and not same_values(headers, heads[0], embeddings[0]):
        wrong.append(_own_head(heads[0], embeddings[0]))
    return tuple(wrong)


def find_untied_heads(
    folder: Path, groups: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, str], ...]:
    """Return (head, embedding) of tied groups whose members differ in the files; () where they
    cannot be read.

    transformers 5 does not tie such members, and trains both. groups: names in the model.
    """
    try:
        paths = [
            path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".json")
        ]
        marks = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    except OSError:
        return ()
    return _own_heads(folder, groups, marks)


@functools.lru_cache(maxsize=32)
def _own_heads(
    folder: Path, groups: tuple[tuple[str, ...], ...], marks: tuple[tuple[str, int, int], ...]
) -> tuple[tuple[str, str], ...]:
    """Read the headers of files with these names, times and sizes; a changed file is read again."""
    try:
        headers = read_headers(folder)
    except (OSError, ValueError):
        return ()
    differing = []
    for group in groups:
        keys = [key for name in group if (key := _key_of(name, headers.tensors)) is not None]
        for key in keys[1:]:
            if key != keys[0] and not same_values(headers, key, keys[0]):
                differing.append((key, keys[0]) if key.endswith(_HEADS) else (keys[0], key))
    return tuple(differing)


def _key_of(name: str, keys: Collection[str]) -> str | None:
    """Return the files' key for a name in the model: the same name, one prefix more or less, or the
    only key with this ending."""
    if name in keys:
        return name
    if (inner := name.partition(".")[2]) in keys:
        return inner
    ending = "." + ".".join(name.split(".")[-2:])
    alike = [key for key in keys if f".{key}".endswith(ending)]
    return alike[0] if len(alike) == 1 else None


def with_untied_head(config: JsonObject) -> JsonObject:
    """Return the configuration with a head that is a parameter of its own."""
    text = config.get("text_config")
    inner: JsonObject = (
        {"text_config": {**text, TIED: False}} if isinstance(text, dict) and TIED in text else {}
    )
    return {**config, **inner, TIED: False}


def tied_head_error(names: Sequence[str]) -> Refusal:
    """Build SW2026 for a model that ties these tensors whatever its configuration says."""
    message = (
        f"the files hold different values for tensors that this model ties: {list_names(names)}"
    )
    help = (
        "Load the intended model with transformers and write the folder again with save_pretrained."
    )
    return Refusal(found("SW2026", _SOURCE, message, help))


def _own_head(head: str, embedding: str) -> Diagnostic:
    message = (
        f"{TIED} is true, but {head} differs from {embedding} in the files: the head is trained "
        "as a parameter of its own, as transformers does"
    )
    help = f"Set {TIED} to false in config.json; to tie them instead, delete {head} from the files."
    return found("SW2026", _SOURCE, message, help, severity="warning")


def check_weights(
    folder: Path, config: JsonObject, graph: ModelGraph, heads: Sequence[tuple[str, str]]
) -> tuple[Diagnostic, ...]:
    """Return warnings and notes about the weights in `folder`. Raises Refusal: SW2022, SW2024 to
    SW2027.

    config: as published.
    heads: (head, embedding) pairs that are trained untied.
    """
    try:
        headers = read_headers(folder)
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        help = "Give a folder that `save_pretrained` wrote (safetensors), or `weights: random`."
        message = f"model.weights: pretrained, but {str(folder)!r} cannot be loaded: {why}"
        raise Refusal(found("SW1913", _WEIGHTS, message, help)) from None
    findings = [*_contradiction(headers), *_quantised(headers, config), *_foreign(headers)]
    if errors := [d for d in findings if d.severity == "error"]:
        raise Refusal(*errors)
    findings += [_own_head(head, embedding) for head, embedding in heads]
    findings += _compare(headers, config, graph)
    if errors := [d for d in findings if d.severity == "error"]:
        raise Refusal(*errors)
    return tuple(findings)


def _contradiction(headers: WeightHeaders) -> Iterator[Diagnostic]:
    if headers.problem:
        help = (
            "Download the files again, or load them with transformers and write them again with "
            "save_pretrained."
        )
        message = f"the weights in {str(headers.folder)!r} contradict each other: {headers.problem}"
        yield found("SW2027", _SOURCE, message, help)
    elif headers.total_size is not None and headers.total_size != headers.stored_bytes:
        message = (
            f"the index counts {headers.total_size:,} bytes of weights, the files hold "
            f"{headers.stored_bytes:,}; the files' headers are used"
        )
        yield found(
            "SW2027",
            _SOURCE,
            message,
            "Check that all shards are of the same version.",
            severity="note",
        )


def _quantised(headers: WeightHeaders, config: JsonObject) -> Iterator[Diagnostic]:
    section = config.get("quantization_config")
    method = str(section.get("quant_method")) if isinstance(section, dict) else ""
    stored = []
    for name, tensor in headers.tensors.items():
        small_float = tensor.dtype.startswith(("F8", "F4", "F6"))
        packed = tensor.dtype in ("U8", "I8", "I32") and name.endswith((".weight", "_proj"))
        beside = tensor.dtype != "BOOL" and _QUANTISED_PARTS.search(name)
        if small_float or packed or beside:
            stored.append(name)
    if not stored:
        return
    dtypes = sorted({headers.tensors[name].dtype for name in stored})
    if method in DEQUANTIZED_METHODS:
        message = (
            f"the weights are {method}: {count_tensors(len(stored))} ({', '.join(dtypes)}) are "
            "dequantized to the training precision on loading (transformers' dequantize=True)"
        )
        yield found(
            "SW2025", _WEIGHTS, message, "Training and export are not quantized.", severity="note"
        )
        return
    kind = f"quantized by {method!r}" if method else "quantized, and config.json does not say how"
    message = (
        f"the weights are {kind}: {count_tensors(len(stored))} of types {', '.join(dtypes)} "
        f"({list_names(stored)})"
    )
    help = (
        "Train from the unquantized weights (the publisher's bf16 repository), or dequantize "
        "them once with transformers (load, model.dequantize(), save_pretrained) and set "
        "model.source to that folder."
    )
    yield found("SW2025", _WEIGHTS, message, help)


def _foreign(headers: WeightHeaders) -> Iterator[Diagnostic]:
    """Report a prefix that a wrapper of the model put before every name."""
    names = list(headers.tensors)
    prefix = next(
        (p for p in _FOREIGN if names and all(name.startswith(p) for name in names)), None
    )
    if prefix is None:
        return
    message = (
        f"all {count_tensors(len(names))} in {str(headers.folder)!r} have the prefix {prefix!r}, "
        "which no model has"
    )
    help = (
        f"The model was saved with its wrapper. Rename the tensors without {prefix!r} "
        "(safetensors' load_file, save_file)."
    )
    if prefix == "base_model.model.":
        help = (
            "The files hold a peft model: load it with peft, call merge_and_unload() and "
            "save_pretrained, and set model.source to that folder."
        )
    yield found("SW2022", _SOURCE, message, help)


def _compare(headers: WeightHeaders, config: JsonObject, graph: ModelGraph) -> Iterator[Diagnostic]:
    """Compare names and shapes, after the renamings and conversions of transformers."""
    import torch
    from transformers import AutoConfig

    from shardwright.models.config_schema import decode_special_floats
    from shardwright.models.tasks.sequence_classification import HEAD_WEIGHT
    from shardwright.models.tasks.task_registry import task_named
    from shardwright.models.weight_conversion import (
        dequantizer,
        ignored_keys,
        map_keys,
        meta_tensor,
    )

    document = decode_special_floats(
        {key: value for key, value in graph.config.items() if key != "auto_map"}
    )
    model_type = str(document.pop("model_type"))
    with torch.device("meta"):
        model = task_named(graph.task).build(AutoConfig.for_model(model_type, **document))

    def empty(key: str) -> torch.Tensor:
        return meta_tensor(headers.tensors[key].shape, headers.tensors[key].dtype)

    quantizer = dequantizer(config)
    keys = map_keys(model, headers.tensors, quantizer)
    shapes: dict[str, tuple[int, ...] | None] = {
        name: headers.tensors[key].shape for name, key in keys.direct.items()
    }
    for conversion in keys.conversions:
        try:
            made = conversion.convert(model, empty)
        except Exception as error:  # transformers' operations fail on an incomplete set of tensors
            why = " ".join(str(error).split())[:200]
            message = (
                f"{conversion.first} cannot be built from "
                f"{count_tensors(len(conversion.sources))}: {why}"
            )
            yield found(
                "SW2022",
                _SOURCE,
                message,
                "Download the files again, or write them again with save_pretrained.",
            )
            shapes[conversion.first] = None
        else:
            shapes |= {name: tuple(tensor.shape) for name, tensor in made.items()}
    for name, first, second in keys.doubled:
        message = f"{first} and {second} are both loaded as {name}"
        yield found("SW2027", _SOURCE, message, "Delete one of them from the files.")
    parameters: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(parameter), []).append(name)
        shape = shapes.get(name)
        built = tuple(parameter.shape)
        if shape is not None and shape != built:
            help = (
                "config.json and the weights belong to different models: take both from one "
                "repository."
            )
            if shape[1:] == built[1:] and built and built[0] == graph.vocabulary_size:
                rows = shape[0] if shape else 0
                help = (
                    f"The embedding has {rows:,} rows, vocab_size is {built[0]:,}: set vocab_size "
                    f"to {rows} in config.json (a padded vocabulary counts with its padding)."
                )
            message = f"shape mismatch for {name}: files {shape}, model {built}"
            yield found("SW2024", _SOURCE, message, help)
        stored = headers.tensors.get(keys.direct.get(name, ""))
        if stored is not None and stored.dtype not in FLOATS:
            message = (
                f"{keys.direct[name]} has type {stored.dtype}; only {', '.join(FLOATS)} can be "
                "trained"
            )
            yield found(
                "SW2025",
                _WEIGHTS,
                message,
                "Write the folder again with save_pretrained in bf16 or fp32.",
            )
    for names in parameters.values():
        stored_keys = [keys.direct[name] for name in names if name in keys.direct]
        differing = [k for k in stored_keys[1:] if not same_values(headers, k, stored_keys[0])]
        if differing:
            yield from tied_head_error([stored_keys[0], *differing]).diagnostics
    unexpected: dict[str, str] = {}
    for key, name in keys.unexpected.items():
        tensor = headers.tensors[key]
        is_float_vector = tensor.dtype in FLOATS and len(tensor.shape) == 1
        if not _BUFFERS.search(key) or (is_float_vector and "inv_freq" not in key):
            unexpected[key] = name
    missing = [names[0] for names in parameters.values() if not shapes.keys() & set(names)]
    if graph.task_traits.scores_sequences and missing == [HEAD_WEIGHT]:
        missing = []
        unexpected = {key: name for key, name in unexpected.items() if not key.endswith(_HEADS)}
        yield found(
            "SW2022",
            _SOURCE,
            f"the files are a language model's: {HEAD_WEIGHT}, the reward model's head, starts at "
            "random, as the type initializes it",
            "Nothing has to be done. `training.seed` decides its values.",
            severity="note",
        )
    if missing:
        yield _missing(missing, len(parameters), list(unexpected))
    silent = ignored_keys(model, unexpected.values())
    yield from _unexpected(
        [key for key, name in unexpected.items() if name not in silent], graph, "warning"
    )
    yield from _unexpected(
        [key for key, name in unexpected.items() if name in silent], graph, "note"
    )


def _missing(missing: Sequence[str], of: int, unexpected: Sequence[str]) -> Diagnostic:
    message = (
        f"{count_tensors(len(missing))} of the model's {of:,} are missing from the files: "
        f"{list_names(missing)}"
    )
    help = (
        "Use weights of this configuration: transformers would initialize the missing ones at "
        "random."
    )
    heads = [name for name in missing if name.endswith(_HEADS)]
    if heads and len(heads) == len(missing):
        help = (
            f"The files have no head. If the head is the embedding, set {TIED} to true in "
            "config.json; if AutoModel wrote the files, write them again from the complete model."
        )
    for key in unexpected:
        tails = [name for name in missing if key.endswith(name) and key != name]
        if tails:
            prefix = key.removesuffix(tails[0])
            help = (
                f"The files hold {key}: rename the tensors without {prefix!r} (safetensors' "
                "load_file, save_file)."
            )
            break
    return found("SW2022", _SOURCE, message, help)


def _unexpected(keys: Sequence[str], graph: ModelGraph, severity: str) -> Iterator[Diagnostic]:
    """Yield one diagnostic for each kind of tensor that the model does not have."""
    layers = sum(layer.kind == "decoder" for layer in graph.layers)
    numbered = re.compile(rf"(^|\.){re.escape(graph.cut.stack.rpartition('.')[2])}\.(\d+)\.")
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kind, number = "", numbered.search(key)
        if _MTP.search(key):
            kind = "multi-token prediction"
        elif graph.task == "causal-lm" and _VISION.search(key):
            kind = "a vision encoder"
        elif number and int(number[2]) >= layers:
            kind = "decoder layers that the configuration does not have"
        elif key.endswith(".bias"):
            kind = "biases that the configuration does not have"
        kinds.setdefault(kind, []).append(key)
    helps = {
        "a vision encoder": (
            "`task: image-text-to-text` trains it, where transformers has such a model."
        ),
        "multi-token prediction": "Next-token prediction does not train these layers; set their "
        "number in config.json to 0 if another program reads it.",
        "decoder layers that the configuration does not have": "Raise the number of layers in "
        "config.json if they belong to the model.",
        "biases that the configuration does not have": "Set the bias key (attention_bias, "
        "qkv_bias, mlp_bias) in config.json if they belong to the model.",
        "": "If they belong to the model, correct its configuration or `model.task`.",
    }
    for kind, names in kinds.items():
        what = f" ({kind})" if kind else ""
        are = "is" if len(names) == 1 else "are"
        message = (
            f"{count_tensors(len(names))} in the files{what} {are} not loaded, trained or "
            f"exported: {list_names(names)}"
        )
        yield found(
            "SW2023",
            _SOURCE,
            message,
            helps[kind],
            severity="warning" if severity == "warning" else "note",
        )
