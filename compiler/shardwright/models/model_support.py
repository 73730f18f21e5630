"""Read the support tables of model types, and build the diagnostics of unsupported types; without
torch.

`python -m tools.generate support_matrix` writes support.json and vlm_support.json from what `make
prove` found.
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
VLM_COLUMNS: tuple[str, ...] = ("layer_split", "pipeline", "zero")
"""Columns for vision-language types."""
VERDICTS: tuple[str, ...] = ("verified", "refused", "untested")

# Ends of class names: users write MistralForCausalLM for the type "mistral".
_ENDINGS = re.compile(r"(forcausallm|lmheadmodel|formaskedlm|model|config)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Record what was verified of one type under one layout.

    verdict: one of VERDICTS.
    code, reason: why it is refused or untested; "" where verified.
    loss: largest absolute difference from the reference run over the steps, None where there was
        none.
    norm: largest relative difference of the gradient norm from the reference run.
    weights: largest absolute difference of a final weight from the reference run.
    sharded: share of the layers' matrices that one rank holds a part of.
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
    """Describe one layout of the table.

    area: what `make prove` recorded it as.
    layout: the recipe's parallelism keys.
    date: date of the measurement (ISO).
    """

    area: str
    layout: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Hold the table of one task.

    types: type -> column -> cell.
    decoders: causal LM types that are the decoder of an encoder-decoder.
    others: every other type of transformers -> "encoder-decoder" or "".
    """

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
def supports_chunked_loss(model_type: str) -> bool:
    """Return whether the type's head can run chunk by chunk (verified by
    tests/zoo/test_chunked.py)."""
    return model_type in json.loads(_text("chunked_loss_types.json"))


@functools.cache
def vision_language_types() -> frozenset[str]:
    """Return the types that transformers maps to image-text-to-text; compiling tries whether one
    can be split."""
    return frozenset(json.loads(_text("vlm_types.json")))


@functools.cache
def torch_compile_types() -> frozenset[str]:
    """Return the types that train under torch.compile as without it
    (tests/parity/test_compiled.py)."""
    return frozenset(json.loads(_text("torch_compile_types.json")))


def nearest_types(text: str, names: Iterable[str], cutoff: float = 0.6) -> tuple[str, ...]:
    """Return up to three of `names` that `text` may mean, nearest first: "Llama-3",
    "MistralForCausalLM".

    cutoff: smallest similarity (difflib).
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
    """Normalize a name: lower case, no separators, no class name's ending."""
    return _ENDINGS.sub("", re.sub(r"[-_. ]", "", name.lower()))


# Diagnostics of model types that cannot be trained. No torch: `shardwright models` answers at once.


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
"""Keys of published files about their author, the weights' storage or a program's settings."""
_WRITTEN_BY_PROGRAMS = frozenset({"architectures", "transformers_version", "auto_map"})
"""A configuration with one of these keys is a published config.json, not one typed by hand."""
_MISSPELT = 0.87
"""Smallest similarity (difflib) at which an unknown name is taken for a misspelt key."""


def unknown_type_error(model_type: object, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """Build SW2003.

    model_type: None where the configuration names none.
    known: the causal LM types of the installed transformers.
    """
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


def untrained_task_error(
    task: TaskName, model_type: str, known: Iterable[str], key: KeyPath | None
) -> Diagnostic:
    """Build SW2004, SW2019, SW2021 or SW1245: transformers has the type, but no model of it for the
    task.

    known: the types that the task trains.
    """
    code, message, help = {
        "causal-lm": (
            "SW2004",
            f"transformers has no causal language model for model_type {model_type!r}",
            "Use a type that AutoModelForCausalLM or AutoModelForImageTextToText "
            "(vision-language) knows, or clip or siglip for contrastive training.",
        ),
        "image-text-to-text": (
            "SW2019",
            f"model_type {model_type!r} takes no images in transformers",
            "`task: image-text-to-text` trains what AutoModelForImageTextToText knows; leave "
            "`task` out for text alone.",
        ),
        "contrastive": (
            "SW2021",
            f"model_type {model_type!r} cannot be trained on pairs of an image and a caption",
            f"`task: contrastive` trains {' and '.join(known)}; leave `task` out for what the "
            "type itself is trained for.",
        ),
        "sequence-classification": (
            "SW1245",
            f"transformers has no sequence classification of a {model_type!r}, which a reward "
            "model is",
            "`objective: {name: reward}` trains types that AutoModelForSequenceClassification and "
            "AutoModelForCausalLM both know.",
        ),
    }[task]
    return found(code, key, message, help, nearest_types(model_type, known, cutoff=0.75))


def encoder_decoder(model_type: str, key: KeyPath | None, *, decoder_alone: bool) -> Diagnostic:
    """Build SW2017.

    decoder_alone: whether transformers has a causal LM of the decoder by itself (bart, whisper,
        ...).
    """
    help = (
        "Only a stack of decoder layers can be split. Use a decoder-only model (llama, qwen3, "
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
    """Build SW2080.

    why: the class that needs the package.
    """
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
    """Yield SW2005 for unknown keys and SW2006 for refused values.

    A published config.json gets one warning for all keys that nothing reads.
    problem: returns what is wrong with a key's value, "" where nothing is.
    inline: whether the configuration is in the recipe, at `key`.
    takes: name of transformers' class in messages.
    """
    is_published = not _WRITTEN_BY_PROGRAMS.isdisjoint(config)
    absent = sorted(known - config.keys())
    choices = sorted(known - METADATA_KEYS)
    unread: list[str] = []
    for name, value in config.items():
        where = (*key, name) if inline else key
        if name not in known:
            if not inline:  # config.json files of folders hold keys that transformers ignores
                continue
            # A name close to that of an absent key is misspelt, in published files too.
            left_out = () if name.startswith("_") else absent
            if is_published and not difflib.get_close_matches(
                name, left_out, n=1, cutoff=_MISSPELT
            ):
                unread.append(name)
                continue
            message = f"unknown key {name!r} for model_type {config['model_type']!r}"
            help = f"model.config takes the keys of transformers' {takes}."
            near = difflib.get_close_matches(name, choices, n=3)
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
