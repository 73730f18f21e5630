"""Convert the settings of DeepSpeed's and of Megatron-LM's Muon to a recipe's."""

from __future__ import annotations

from shardwright.migrate.recipe_draft import ImportSources, as_integer, as_number, as_text
from shardwright.utils.json_values import JsonValue

SECTION = "training.optimizer"
_PARAMS = "optimizer.params"
_DEEPSPEED: tuple[tuple[str, tuple[str, ...], JsonValue], ...] = (
    ("lr", ("muon_lr", "lr"), 0.02),
    ("adamw_lr", ("adam_lr", "lr"), 3e-4),
    ("momentum", ("momentum",), 0.95),
    ("weight_decay", ("weight_decay",), 0.0),
    ("eps", ("eps",), 1e-10),
)
"""A recipe's key, DeepSpeed's parameters in the order in which they count, and its default
(deepspeed/runtime/zero/muon/original_muon.py, 0.19.8)."""
_DEEPSPEED_BETAS: JsonValue = [0.9, 0.95]
_MEGATRON_NUMBERS: tuple[tuple[str, str, JsonValue], ...] = (
    ("momentum", "muon_momentum", 0.9),
    ("ns_steps", "muon_num_ns_steps", 5),
)
_MEGATRON_MEANINGS = (
    ("muon_scale_mode", "spectral", "shape_scaling", "a matrix's update has another scale"),
    ("muon_coefficient_type", "quintic", "simple", "the iterations have other coefficients"),
)
"""Megatron-LM's option, its default, the value that a recipe's muon has, and what another means."""


def deepspeed_muon(s: ImportSources, kind: str) -> None:
    """Convert `optimizer: {type: Muon}` of a ds_config."""
    s.draft.put(f"{SECTION}.name", "muon", f"optimizer.type: {kind}", "optimizer.type")
    params = s.section(_PARAMS)
    for key, names, default in _DEEPSPEED:
        name = next((n for n in names if as_number(params.get(n)) is not None), None)
        written = next((n for n in names if n in params), None)
        if name is not None:
            s.draft.put(f"{SECTION}.{key}", params[name], f"{_PARAMS}.{name}", f"{_PARAMS}.{name}")
        elif written is not None:
            s.draft.ask(
                f"{SECTION}.{key}", f"{_PARAMS}.{written} is {params[written]!r}, no number"
            )
        else:
            s.draft.put(f"{SECTION}.{key}", default, "DeepSpeed's default")
    betas = params.get("betas")
    known = isinstance(betas, list) and len(betas) == 2
    s.draft.put(
        f"{SECTION}.betas",
        betas if known else _DEEPSPEED_BETAS,
        f"{_PARAMS}.betas" if known else "DeepSpeed's default",
        *((f"{_PARAMS}.betas",) if known else ()),
    )
    s.draft.put(f"{SECTION}.ns_steps", 5, "DeepSpeed's number")
    if "ns_method" in params:
        why = "a recipe's muon iterates on the matrix, whose result differs by rounding"
        s.draft.leave(SECTION, f"{_PARAMS}.ns_method", params["ns_method"], why)
    carried = {n for _, names, _ in _DEEPSPEED for n in names} | {"betas", "ns_method"}
    for name, value in params.items():
        if name not in carried:
            why = "a recipe's muon has no such parameter"
            s.draft.leave(SECTION, f"{_PARAMS}.{name}", value, why)
    s.draft.note(
        SECTION,
        "a recipe's muon clips the gradient; DeepSpeed's, from ZeRO-1 on, clips the orthogonalized "
        "update: with gradient_clipping its learning rates are others",
    )


def megatron_muon(s: ImportSources) -> bool:
    """Convert Megatron-LM's --optimizer muon and its options; return whether it is there."""
    typed = s.word(as_text, "optimizer")
    is_megatron = s.program is not None and s.program.target == "megatron"
    if not is_megatron or typed is None or typed[1].lower() not in ("muon", "dist_muon"):
        return False
    s.draft.put(f"{SECTION}.name", "muon", typed[0])
    reasons = []
    for option, default, own, means in _MEGATRON_MEANINGS:
        given = s.word(as_text, option)
        if given is not None and given[1] == own:
            s.draft.take(given[0], SECTION)
            continue
        shown = " ".join(given) if given is not None else f"--{option.replace('_', '-')} {default}"
        reasons.append(f"{shown}: {means}")
        if given is not None:
            s.draft.leave(SECTION, given[0], given[1], f"a recipe's muon has {own}")
    factor = s.word(as_number, "muon_extra_scale_factor")
    if factor is not None and factor[1] != 1:
        reasons.append(f"{factor[0]} {factor[1]:g}: multiply the matrices' rate by it")
        s.draft.leave(SECTION, factor[0], factor[1], "a recipe's muon has no factor")
    rate = s.word(as_number, "learning_rate", "lr")
    if rate is not None:
        s.draft.put(f"{SECTION}.adamw_lr", rate[1], rate[0], rate[0])
    if s.setting("muon_nesterov") is None:
        reasons.append("no --muon-nesterov: a recipe's muon has Nesterov's momentum")
    else:
        s.draft.take("--muon-nesterov", SECTION)
    if reasons:
        s.draft.ask(f"{SECTION}.lr", f"the matrices' learning rate; {'; '.join(reasons)}")
    elif rate is not None:
        s.draft.put(f"{SECTION}.lr", rate[1], rate[0], rate[0])
    for key, option, usual in _MEGATRON_NUMBERS:
        found = s.word(as_integer if key == "ns_steps" else as_number, option)
        if found is None:
            s.draft.put(f"{SECTION}.{key}", usual, "Megatron-LM's default")
        else:
            s.draft.put(f"{SECTION}.{key}", found[1], found[0], found[0])
    return True
