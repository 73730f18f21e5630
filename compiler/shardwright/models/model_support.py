"""The support matrices: what the zoo proved of each causal-LM type, and of each type that sees.
Data (support.json, vlm_support.json), read without torch.

Both are written by `make generated` from benchmarks/zoo-*.json; nobody types them.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from importlib import resources

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.literal_types import TaskName
from shardwright.utils.json_values import JsonObject, JsonValue

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


# The diagnostics of model types that cannot be trained here. No torch: `shardwright models`
# answers at once.


POPULAR = ("llama", "qwen2", "gpt2")
METADATA_KEYS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "compression_config",
        "custom_pipelines",
        "dtype",
        "experts_implementation",
        "gradient_checkpointing",
        "model_name",
        "name_or_path",
        "pretraining_tp",
        "quantization",
        "quantization_config",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
"""Keys of published files that say who wrote them, how the weights are stored, or how a program
runs them."""
_WRITTEN_BY_PROGRAMS = frozenset({"architectures", "transformers_version", "auto_map"})
"""One of these tells that a configuration is a published config.json, not typed by hand."""
_MISSPELT = 0.87
"""Similarity (difflib) from which an unknown name is taken for a misspelt key: one letter in
eight."""


def unknown_type_error(model_type: object, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2003. known: the causal-LM types of the installed transformers. model_type: None where none
    is named."""
    message = (
        "the configuration names no model_type"
        if model_type is None
        else f"unknown model_type {model_type!r}"
    )
    help = (
        "Give one of transformers' causal language models, by the `model_type` of its config.json; "
        "`shardwright models` lists them."
    )
    return found("SW2003", key, message, help, nearest_types(str(model_type), known) or POPULAR)


def not_causal_lm(model_type: str, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2004: transformers has the type, without a causal language model."""
    message = f"model_type {model_type!r} is no causal language model in transformers"
    help = (
        "This compiler trains causal language models (AutoModelForCausalLM must know the type), "
        "models that see (AutoModelForImageTextToText must), and clip and siglip on pairs of a "
        "picture and a caption."
    )
    return found("SW2004", key, message, help, nearest_types(model_type, known, cutoff=0.75))


def not_vision_language(model_type: str, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2019: transformers has the type, without a model of it that sees."""
    message = f"model_type {model_type!r} takes no pictures in transformers"
    help = (
        "`task: image-text-to-text` trains what AutoModelForImageTextToText knows; leave `task` "
        "out for text alone."
    )
    return found("SW2019", key, message, help, nearest_types(model_type, known, cutoff=0.75))


def not_contrastive(model_type: str, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2021. known: the types that are trained on pairs."""
    message = f"model_type {model_type!r} is not trained on pairs of a picture and a caption here"
    help = (
        f"`task: contrastive` trains {' and '.join(known)}; leave `task` out for what the type "
        "itself is trained for."
    )
    return found("SW2021", key, message, help, nearest_types(model_type, known, cutoff=0.75))


def encoder_decoder(model_type: str, key: KeyPath | None, *, decoder_alone: bool) -> Diagnostic:
    """SW2017. decoder_alone: transformers has a causal LM of the decoder by itself (bart,
    whisper...)."""
    help = (
        "A stack of decoder layers is what can be cut. Use a decoder-only model (llama, qwen3, "
        "mistral...)"
    )
    if decoder_alone:
        help += (
            ", or train its decoder alone: `is_encoder_decoder: false` and `is_decoder: true` "
            "in its configuration"
        )
    message = f"{model_type!r} is an encoder-decoder: it reads one sequence and writes another"
    return found("SW2017", key, message, f"{help}.", POPULAR)


def missing_processor_package(model_type: str, why: str, package: str) -> Diagnostic:
    """SW2080. why: which class needs the package."""
    message = f"the processor of a {model_type!r} cannot be loaded: {why}"
    return found(
        "SW2080", ("model",), message, f"pip install {package}, here and on every host of the run."
    )


def config_key_errors(
    config: JsonObject,
    known: Set[str],
    problem: Callable[[str, JsonValue], str],
    key: KeyPath,
    *,
    inline: bool,
    takes: str,
) -> Iterator[Diagnostic]:
    """SW2005 unknown, SW2006 a value that is refused. problem: of a name and its value, "" where
    there is none. A published config.json gets one warning for its keys that nothing reads. inline:
    the configuration stands in the recipe at `key`. takes: transformers' class, in words."""
    is_published = not _WRITTEN_BY_PROGRAMS.isdisjoint(config)
    unread: list[str] = []
    for name, value in config.items():
        where = (*key, name) if inline else key
        if name not in known:
            if not inline:  # config.json files of folders carry keys that transformers ignores
                continue
            # A name that is nearly that of a key which the file leaves out is misspelt, whoever
            # wrote it.
            left_out = () if name.startswith("_") else known - config.keys()
            if is_published and not difflib.get_close_matches(
                name, left_out, n=1, cutoff=_MISSPELT
            ):
                unread.append(name)
                continue
            message = f"unknown key {name!r} for model_type {config['model_type']!r}"
            help = f"model.config takes the keys of transformers' {takes}."
            near = difflib.get_close_matches(name, sorted(known - METADATA_KEYS), n=3)
            yield found("SW2005", where, message, help, near)
        elif wrong := problem(name, value):
            help = f"See transformers' {takes} for what this key takes."
            yield found("SW2006", where, f"{name}: {value!r} {wrong}", help)
    if unread:
        message = (
            f"transformers reads no {', '.join(map(repr, unread))} of a {config['model_type']!r} "
            "configuration"
        )
        help = (
            "The model is built without them. Delete them, or say what they mean in keys that "
            "transformers reads."
        )
        yield found("SW2005", key, message, help, severity="warning")
