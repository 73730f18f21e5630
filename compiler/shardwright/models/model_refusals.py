"""The diagnostics of model types that cannot be trained here. No torch: `shardwright models`
answers at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Set

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.models.model_support import nearest_types
from shardwright.utils.json_types import JsonObject, JsonValue

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
