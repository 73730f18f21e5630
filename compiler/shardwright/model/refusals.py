"""The diagnostics of model types that cannot be trained here. No torch: `shardwright models` answers at once."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.diagnostics import Diagnostic, KeyPath
from shardwright.model.support import nearest_types

POPULAR = ("llama", "qwen2", "gpt2")


def unknown_type(model_type: object, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2003. known: the causal-LM types of the installed transformers. model_type: None where none is named."""
    return Diagnostic(
        code="SW2003",
        message="the configuration names no model_type" if model_type is None else f"unknown model_type {model_type!r}",
        help="Give one of transformers' causal language models, by the `model_type` of its config.json; "
        "`shardwright models` lists them.",
        key=key,
        valid=nearest_types(str(model_type), known) or POPULAR,
    )


def no_causal_lm(model_type: str, known: Iterable[str], key: KeyPath | None) -> Diagnostic:
    """SW2004: transformers has the type, without a causal language model."""
    return Diagnostic(
        code="SW2004",
        message=f"model_type {model_type!r} is no causal language model in transformers",
        help="This compiler trains causal language models; AutoModelForCausalLM must know the type.",
        key=key,
        valid=nearest_types(model_type, known, cutoff=0.75),
    )


def encoder_decoder(model_type: str, key: KeyPath | None, *, decoder_alone: bool) -> Diagnostic:
    """SW2017. decoder_alone: transformers has a causal LM of the decoder by itself (bart, whisper...)."""
    help = "A stack of decoder layers is what can be cut. Use a decoder-only model (llama, qwen3, mistral...)"
    if decoder_alone:
        help += ", or train its decoder alone: `is_encoder_decoder: false` and `is_decoder: true` in its configuration"
    return Diagnostic(
        code="SW2017",
        message=f"{model_type!r} is an encoder-decoder: it reads one sequence and writes another",
        help=f"{help}.",
        key=key,
        valid=POPULAR,
    )
