"""The support matrices: what the zoo proved of each causal-LM type, and of each type that sees.
Data (support.json, vlm_support.json), read without torch.

Both are written by `make proof` from benchmarks/zoo-*.json; nobody types them.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from shardwright.recipe.literal_types import TaskName

COLUMNS: tuple[str, ...] = (
    *("zero", "pipeline", "tensor_sharded", "tensor_fallback", "pipeline_tensor"),
    *("expert", "context"),
)
VLM_COLUMNS: tuple[str, ...] = ("apart", "pipeline", "zero")
"""Of types that see."""
VERDICTS: tuple[str, ...] = ("proved", "refused", "untested")

# Some popular families are written in another way than transformers names them.
_ENDINGS = re.compile(r"(forcausallm|lmheadmodel|formaskedlm|model|config)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One type under one layout.

    verdict: one of VERDICTS. code, reason: why it is refused or untested, "" where proved. loss:
    largest absolute difference over the steps; norm: largest relative difference of the gradient
    norm; weights: largest absolute difference of a final weight; each from the plain run, None
    where there was none. sharded: share of the layers' matrices that one rank holds a part of.
    """

    verdict: str
    code: str = ""
    reason: str = ""
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    sharded: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """benchmark: the file under benchmarks/; layout: as the recipe's parallelism keys; date:
    measured on, ISO."""

    benchmark: str
    layout: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """types: type of a task -> column -> cell. Of causal LMs alone: decoders: those of them that
    are the decoder of an encoder-decoder; others: every other type of transformers ->
    "encoder-decoder" or ""."""

    transformers: str
    columns: dict[str, Column]
    types: dict[str, dict[str, Cell]]
    decoders: tuple[str, ...]
    others: dict[str, str]


def support_text(task: TaskName = "causal-lm") -> str:
    return _text("vlm_support.json" if task == "image-text-to-text" else "support.json")


def _text(name: str) -> str:
    return resources.files("shardwright.models").joinpath(name).read_text("utf-8")


@functools.cache
def support(task: TaskName = "causal-lm") -> Support:
    document = json.loads(support_text(task))
    types = document["types"].items()
    return Support(
        transformers=document["transformers"],
        columns={name: Column(**column) for name, column in document["columns"].items()},
        types={
            name: {column: Cell(**cell) for column, cell in cells.items()} for name, cells in types
        },
        decoders=tuple(document["decoders"]),
        others=document["others"],
    )


@functools.cache
def _chunked_types() -> frozenset[str]:
    return frozenset(json.loads(_text("chunked_loss_types.json")))


def supports_chunked_loss(model_type: str) -> bool:
    """Whether its head runs chunk by chunk: what tests/zoo/test_chunked.py proved."""
    return model_type in _chunked_types()


@functools.cache
def vision_language_types() -> frozenset[str]:
    """Those that transformers maps to image-text-to-text. Whether one comes apart is tried when it
    is compiled."""
    return frozenset(json.loads(_text("vlm_types.json")))


@functools.cache
def torch_compile_types() -> frozenset[str]:
    """Types whose decoder layers train under torch.compile as without:
    tests/parity/test_compiled.py."""
    return frozenset(json.loads(_text("torch_compile_types.json")))


def nearest_types(text: str, names: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """Up to three of `names` that `text` may mean, the nearest first: "Llama-3",
    "MistralForCausalLM", "gpt-neo".

    cutoff: least likeness, as of difflib.
    """
    plain: dict[str, str] = {}
    for name in sorted(names):
        plain.setdefault(_plain(name), name)
    wanted = _plain(text.rpartition("/")[2])
    family = re.sub(r"[0-9.]+.*$", "", wanted)  # qwen9 is nearest to its own family
    found = [wanted] if wanted in plain else []
    found += difflib.get_close_matches(wanted, plain, n=3, cutoff=cutoff)
    if len(family) > 2:
        kin = [key for key in plain if re.sub(r"[0-9.]+.*$", "", key) == family]
        found += sorted(
            kin, key=lambda key: (-difflib.SequenceMatcher(None, wanted, key).ratio(), key)
        )
    return tuple(plain[key] for key in dict.fromkeys(found))[:3]


def _plain(name: str) -> str:
    """Lower case, one spelling of the separators, without a class name's ending."""
    return _ENDINGS.sub("", re.sub(r"[-_. ]", "", name.lower()))
