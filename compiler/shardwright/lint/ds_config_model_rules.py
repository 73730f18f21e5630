"""What a ds_config asks of DeepSpeed that the named model does not take: AutoEP's expert ranks, and
the wrapper that shares rows out over sequence ranks (Ulysses). The file alone does not show it, so
these rules want `--model`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources

from shardwright.diagnostics import Refusal, Severity
from shardwright.lint.lint_rule import LintedDsConfig, LintFinding
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.hub_files import read_config
from shardwright.models.model_catalog import match_catalog_id
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.json_types import JsonObject, JsonValue

SEQUENCE = "sequence_parallel_size"
AUTOEP = "expert_parallel"


def lint_for_model(
    ds_config: LintedDsConfig, model: str, sequence_length: int | None
) -> tuple[LintFinding, ...]:
    """SW4612 to SW4614. sequence_length: tokens of a row, None where it was not given. Raises
    Refusal: SW20xx where the model's configuration cannot be had."""
    ranks = ds_config.integer(SEQUENCE) or 1
    wants_experts = ds_config.is_on(AUTOEP, "enabled")
    if ranks == 1 and not wants_experts:
        return ()
    section = ModelSection(
        source=os.path.abspath(model) if os.path.isdir(model) else match_catalog_id(model) or model,
        config=None,
        revision="main",
        weights="random",
        attention="auto",
        loss="auto",
    )
    config, _ = read_config(section)
    found: list[LintFinding] = []
    if wants_experts:
        found += _experts(ds_config, str(config.get("model_type", "")))
    if ranks > 1:
        with suppress(Refusal):  # a type that is not planned here has a configuration all the same
            config = build_model_graph(section).config
        found += [*_window(config, ranks, sequence_length), *_heads(config, ranks)]
    return tuple(found)


def detected() -> Mapping[str, str]:
    """Type of the model -> what AutoEP makes of it: found | missed | refused, as
    tools/generate/autoep_support.py measured it for every type of transformers that has experts and
    runs."""
    text = resources.files("shardwright.lint").joinpath("autoep.json").read_text("utf-8")
    table: dict[str, str] = json.loads(text)
    return table


def _experts(ds_config: LintedDsConfig, kind: str) -> Iterator[LintFinding]:
    # With either of these DeepSpeed raises where it finds nothing (auto_ep.py,
    # _requires_selected_preset_detection).
    if (
        ds_config.get(AUTOEP, "preset_model") is not None
        or ds_config.get(AUTOEP, "moe_layer_pattern") is not None
    ):
        return
    known = detected()
    outcome = known.get(kind, "missed")
    if outcome == "found":
        return
    severity: Severity = "warning"
    if outcome == "refused":
        severity, message = "error", f"AutoEP refuses a model of type {kind}"
    elif kind in known:
        message = f"AutoEP does not find the experts of {kind}: it trains without expert ranks"
    else:
        message = f"AutoEP finds no experts in {kind or 'this model'}: `{AUTOEP}` has no effect"
    yield LintFinding(
        code="SW4612",
        key=(AUTOEP, "enabled"),
        message=message,
        help=f"Its presets are for {', '.join(sorted(t for t in known if known[t] == 'found'))}. "
        "Give preset_model or "
        "moe_layer_pattern, with which DeepSpeed raises where it finds nothing; or `shardwright "
        "import` the file and "
        "set parallelism.expert.",
        severity=severity,
        at="key",
    )


def _window(config: JsonObject, ranks: int, sequence_length: int | None) -> Iterator[LintFinding]:
    width = window(config)
    if width is None or (sequence_length is not None and sequence_length <= width):
        return
    yield LintFinding(
        code="SW4613",
        key=(SEQUENCE,),
        message=(
            f"under sdpa and flex_attention {ranks} sequence ranks lose {_kind(config)}'s "
            f"window of {width} tokens"
        ),
        help='Load the model with attn_implementation="flash_attention_2", which is told the '
        "window itself; or "
        "`shardwright import` the file and set parallelism.context.",
        severity="warning",
    )


def window(config: JsonObject) -> int | None:
    """How many tokens a layer with a window, or in chunks, sees; None where every layer sees
    all."""
    text = _text(config)
    kinds = text.get("layer_types")
    for key, kind in (
        ("sliding_window", "sliding_attention"),
        ("attention_chunk_size", "chunked_attention"),
    ):
        width = text.get(key)
        used = (
            kind in kinds
            if isinstance(kinds, list)
            else text.get("use_sliding_window") is not False
        )
        if isinstance(width, int) and not isinstance(width, bool) and used:
            return width
    return None


def _heads(config: JsonObject, ranks: int) -> Iterator[LintFinding]:
    text = _text(config)
    heads, shared = _whole(text.get("num_attention_heads")), _whole(text.get("num_key_value_heads"))
    message = ""
    if heads and heads % ranks:
        message = f"{heads} attention heads are not divisible by {ranks} sequence ranks"
    elif shared and shared % ranks and ranks % shared:
        message = (
            f"{shared} key and value heads are neither a multiple nor a divisor of {ranks} "
            "sequence ranks"
        )
    if message:
        yield LintFinding(
            code="SW4614",
            key=(SEQUENCE,),
            message=f"{_kind(config)}: {message}",
            help="Take a number of sequence ranks that divides the heads; or `shardwright import` "
            "the file and set "
            "parallelism.context, which repeats key and value heads.",
        )


def _text(config: JsonObject) -> JsonObject:
    """The part about text, as get_text_config gives it to the wrapper."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _whole(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _kind(config: JsonObject) -> str:
    return str(config.get("model_type") or "the model")
