"""Checks keys against each other, without the model and without the files.

Each check names the keys that it reads, and is skipped where one of them is wrong already: one
mistake gives one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.island_keys import (
    ISLAND_KEYS,
    island_count,
    island_key_errors,
    single_island_document,
)
from shardwright.recipe.kubernetes_pod_patch import pod_patch_errors
from shardwright.recipe.recipe_schema import join_with_or
from shardwright.recipe.recipe_types import FREE_DEGREES, optimizer_steps
from shardwright.recipe.sbatch_options import sbatch_option_errors
from shardwright.utils.divisors import context_degrees, degree_mismatch, nearest_multiples
from shardwright.utils.json_values import JsonObject, JsonValue


class DocumentView:
    """Reads a completed document by dotted key; None for what is absent or `auto`."""

    def __init__(self, document: JsonObject) -> None:
        self.document = document
        self.of_an_island = " of one island" if island_count(document) > 1 else ""

    def get(self, dotted: str) -> JsonValue:
        value: JsonValue = self.document
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return None if value == "auto" else value

    def number(self, dotted: str) -> int | None:
        return cast("int | None", self.get(dotted))

    def real(self, dotted: str) -> float | None:
        return cast("float | None", self.get(dotted))

    def text(self, dotted: str) -> str:
        return str(self.get(dotted))

    def given(self, *dotted: str) -> list[str]:
        return [key for key in dotted if self.get(key) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """Holds a check. all_islands: it reads the recipe of all islands, not that of one."""

    keys: tuple[str, ...]
    find: Callable[[DocumentView], Iterable[Diagnostic]]
    all_islands: bool = False


def cross_key_errors(document: JsonObject, wrong: Iterable[KeyPath]) -> tuple[Diagnostic, ...]:
    """Return the errors of a completed document. wrong: keys that have a diagnostic already."""
    bad, view = {key for key in wrong if key}, DocumentView(single_island_document(document))
    above = {key[:length] for key in bad for length in range(1, len(key) + 1)}
    errors: list[Diagnostic] = []
    for check in CHECKS:
        paths: list[KeyPath] = [tuple(key.split(".")) for key in check.keys]
        # A key is unusable if it, a section above it, or something in it is wrong.
        if not any(
            path in above or any(path[:n] in bad for n in range(1, len(path))) for path in paths
        ):
            errors.extend(check.find(DocumentView(document) if check.all_islands else view))
    return tuple(errors)


def _exactly_one(section: str, names: tuple[str, ...], example: str) -> CrossCheck:
    keys = tuple(f"{section}.{name}" for name in names)

    def find(view: DocumentView) -> Iterable[Diagnostic]:
        given = view.given(*keys)
        if not given and view.get(section) is not None:  # `validation` is optional
            yield found(
                "SW1201",
                section,
                f"`{section}` needs one of {join_with_or(names)}",
                f"Add `{example}`.",
            )
        if len(given) > 1:
            shown = " and ".join(f"`{key.rpartition('.')[2]}`" for key in given)
            yield found(
                "SW1202",
                given[1],
                f"`{section}` has {shown}; they exclude each other",
                "Keep one of them.",
            )

    return CrossCheck(keys=keys, find=find)


def _at_most_one(section: str, first: str, second: str) -> CrossCheck:
    keys = (f"{section}.{first}", f"{section}.{second}")

    def find(view: DocumentView) -> Iterable[Diagnostic]:
        if len(view.given(*keys)) == 2:
            message = f"`{section}` has `{first}` and `{second}`; they exclude each other"
            yield found("SW1202", keys[1], message, "Keep one of them.")

    return CrossCheck(keys=keys, find=find)


def _weights(view: DocumentView) -> Iterable[Diagnostic]:
    if view.get("model.weights") == "pretrained" and view.get("model.config") is not None:
        message = "model.weights: pretrained needs model.source; a config has no weights"
        yield found(
            "SW1209",
            "model.weights",
            message,
            "Write `weights: random`, or give `source:` instead of `config:`.",
        )


def _check_trust_remote_code(view: DocumentView) -> Iterable[Diagnostic]:
    trusted, source = view.get("model.trust_remote_code"), view.get("model.source")
    if trusted is None or trusted == source:
        return
    if source is None:
        help = "Remove it: model.config is data, there is no code to run."
        yield found(
            "SW1212",
            "model.trust_remote_code",
            "trust_remote_code without model.source trusts nothing",
            help,
        )
    else:
        message = f"trust_remote_code names {trusted!r}, and model.source is {source!r}"
        help = (
            "If you have read that code and trust it, write the same text as model.source; else "
            "remove the key."
        )
        yield found("SW1212", "model.trust_remote_code", message, help, (str(source),))


def _data_parallel(view: DocumentView) -> tuple[int | None, str]:
    """Return the data parallel degree that is pinned or follows from the world size, and the text
    that shows its origin; (None, "") where neither gives it."""
    data = view.number("parallelism.data")
    if data is not None:
        return data, f"data={data}"
    degrees = {
        key: view.number(key) for key in ("cluster.nodes", "cluster.gpus_per_node", *_DEGREES[:-1])
    }
    if None in degrees.values() or not _context_is_off(view):
        return None, ""
    nodes, gpus, *others = cast("list[int]", list(degrees.values()))
    data, rest = divmod(nodes * gpus, math.prod(others))
    if rest:
        return None, ""  # the world does not divide: _world's finding
    shown = " x ".join(f"{key.rpartition('.')[2]}={degrees[key]}" for key in _DEGREES[:-1])
    return data, f"data={data} (world {nodes * gpus} / ({shown}))"


_DEGREES = tuple(f"parallelism.{name}" for name in FREE_DEGREES)
"""Lists the free degrees; data is the last."""
_CONTEXT = "parallelism.context"
"""Names the degree that is not free: 1 in most recipes."""


def _context_is_off(view: DocumentView) -> bool:
    """Tell whether context parallelism is off: the free degrees alone make up the world size."""
    degree, length = view.number(_CONTEXT), view.get("training.sequence_length")
    if degree is None and isinstance(length, int):  # auto
        degree = max(context_degrees(length, view.number("cluster.gpus_per_node") or 1))
    return degree in (None, 1)


def _check_world_size(view: DocumentView) -> Iterable[Diagnostic]:
    nodes, gpus = view.number("cluster.nodes"), view.number("cluster.gpus_per_node")
    pinned = {
        key.rpartition(".")[2]: degree
        for key in _DEGREES
        if (degree := view.number(key)) is not None
    }
    if nodes is None or gpus is None or not pinned or not _context_is_off(view):
        return
    complete = len(pinned) == len(_DEGREES)
    wrong = degree_mismatch(pinned, nodes * gpus, complete=complete)
    if wrong is None:
        return
    culprit, near = wrong
    total = " x ".join(f"{name}={degree}" for name, degree in pinned.items())
    total += f" = {math.prod(pinned.values())}" if len(pinned) > 1 else ""
    whose = "an island" if view.of_an_island else "the cluster"
    world = f"the {nodes * gpus} GPUs of {whose} (nodes={nodes} x gpus_per_node={gpus})"
    if complete:
        message = f"{total} does not make up {world}"
        help = (
            f"Write `{culprit}: {near[0]}` or `auto`."
            if near
            else "Make the product the world size."
        )
    else:
        message = f"{total} does not divide {world}"
        help = f"{culprit} could be {join_with_or(tuple(map(str, near)))}, or `auto`."
    yield found("SW1203", f"parallelism.{culprit}", message, help, near)


def _batch(view: DocumentView) -> Iterable[Diagnostic]:
    batch, micro = (
        view.number("training.global_batch_size"),
        view.number("parallelism.micro_batch_size"),
    )
    data, data_shown = _data_parallel(view)
    group = (micro or 1) * (data or 1)
    if batch is None or group == 1 or batch % group == 0:
        return
    shown = " x ".join(
        part for part in (f"micro_batch_size={micro}" if micro else "", data_shown) if part
    )
    near = tuple(map(str, nearest_multiples(group, batch)))
    of = f" = {group}" if micro and data else ""
    message = f"global_batch_size {batch}{view.of_an_island} is not a multiple of {shown}{of}"
    help = f"The nearest batch sizes{view.of_an_island} are {join_with_or(near)}."
    yield found("SW1204", "training.global_batch_size", message, help, near)


def _steps(view: DocumentView) -> int | None:
    keys = ("steps", "tokens", "global_batch_size", "sequence_length")
    return optimizer_steps(*(view.number(f"training.{key}") for key in keys))


def _schedule(view: DocumentView) -> Iterable[Diagnostic]:
    scheduler, steps = "training.scheduler", _steps(view)
    warmup, decay = (
        view.number(f"{scheduler}.warmup_steps") or 0,
        view.number(f"{scheduler}.decay_steps"),
    )
    curve = view.text(f"{scheduler}.name")
    if warmup and steps is not None and warmup >= steps:
        message = f"warmup_steps {warmup} leaves nothing of the {steps} steps of the training"
        yield found(
            "SW1205",
            f"{scheduler}.warmup_steps",
            message,
            f"Give fewer than {steps} steps, or warmup_ratio.",
        )
    if curve == "wsd" and decay is None:
        message = (
            "the wsd schedule needs decay_steps: over how many of the last steps the rate falls"
        )
        yield found(
            "SW1205",
            f"{scheduler}.name",
            message,
            "Add `decay_steps:`; a tenth of the steps is common.",
        )
    elif curve != "wsd" and decay is not None:
        help = "Remove it, or write `name: wsd`."
        yield found(
            "SW1205",
            f"{scheduler}.decay_steps",
            f"decay_steps is for wsd, and the schedule is {curve}",
            help,
        )
    elif decay is not None and steps is not None and warmup < steps < warmup + decay:
        message = (
            f"warmup_steps {warmup} and decay_steps {decay} are more than the {steps} steps "
            "of the training"
        )
        yield found(
            "SW1205", f"{scheduler}.decay_steps", message, f"Give at most {steps - warmup}."
        )


def _min_lr(view: DocumentView) -> Iterable[Diagnostic]:
    low, high = view.real("training.scheduler.min_lr"), view.real("training.optimizer.lr")
    if low is not None and high is not None and low > high:
        message = f"min_lr {low:g} is above optimizer.lr {high:g}"
        yield found("SW1205", "training.scheduler.min_lr", message, f"Give at most {high:g}.")


def _accumulation(view: DocumentView) -> Iterable[Diagnostic]:
    """Check that gradients accumulate in the compute type or in fp32, as DeepSpeed does."""
    key, precision = "training.gradient_accumulation_dtype", view.text("training.precision")
    dtype, valid = view.get(key), tuple(dict.fromkeys(("auto", "fp32", precision)))
    if dtype is not None and dtype not in valid:
        message = f"gradient_accumulation_dtype {dtype} does not go with precision {precision}"
        yield found("SW1206", key, message, f"Write {join_with_or(valid)}.", valid)


def _auto_nodes(view: DocumentView) -> Iterable[Diagnostic]:
    nodes, days = view.number("cluster.nodes"), view.real("training.days_at_most")
    if nodes is None and days is None:
        message = (
            "cluster.nodes: auto needs training.days_at_most, the time that the training may take"
        )
        yield found(
            "SW1207",
            "cluster.nodes",
            message,
            "Add `days_at_most:` under `training`, or give the number of nodes.",
        )
    if nodes is not None and days is not None:
        message = (
            f"training.days_at_most only chooses the number of nodes, and cluster.nodes is {nodes}"
        )
        yield found(
            "SW1207", "training.days_at_most", message, "Remove it, or write `nodes: auto`."
        )


_SCHEDULERS = ("launch.slurm", "launch.kubernetes")


def _schedulers(view: DocumentView) -> Iterable[Diagnostic]:
    launcher, given = view.get("launch.launcher"), view.given(*_SCHEDULERS)
    if launcher is None and len(given) > 1:
        names = " and ".join(f"a {section.rpartition('.')[2]}" for section in given)
        message = f"launch has {names} section, and launcher: auto"
        yield found("SW1208", given[1], message, "Keep one of them.")
    for section in given:
        name = section.rpartition(".")[2]
        if launcher not in (None, name):
            message = f"a {name} section has no effect with launcher: {launcher}"
            yield found("SW1208", section, message, f"Remove it, or write `launcher: {name}`.")
    if launcher == "kubernetes" and view.get("launch.kubernetes") is None:
        message = "launcher: kubernetes needs the image and the volume that the pods use"
        help = (
            "Add `kubernetes: {image: ..., volume_claim: ..., directory: /shared/...}` under "
            "`launch`."
        )
        yield found("SW1201", "launch.launcher", message, help)


def _slurm(view: DocumentView) -> Iterable[Diagnostic]:
    extra = view.get("launch.slurm.extra")
    return () if extra is None else sbatch_option_errors(extra)


def _kubernetes(view: DocumentView) -> Iterable[Diagnostic]:
    if view.get("launch.kubernetes") is None:
        return
    directory, mount = (
        view.text("launch.kubernetes.directory"),
        view.text("launch.kubernetes.mount_path").rstrip("/"),
    )
    if ".." in directory.split("/") or not directory.startswith(f"{mount}/"):
        message = (
            f"launch.kubernetes.directory: {directory} is not inside mount_path, {mount or '/'}"
        )
        yield found(
            "SW1213", "launch.kubernetes.directory", message, f"Give a folder below {mount or '/'}."
        )
    if view.get("launch.env_from") and view.get("launch.kubernetes.secret") is None:
        message = (
            "launch.env_from needs launch.kubernetes.secret: a manifest holds no secret values"
        )
        help = "Make a Secret with these names as its keys and give its name."
        yield found("SW1213", "launch.env_from", message, help)


def _pod_patch(view: DocumentView) -> Iterable[Diagnostic]:
    patch = view.get("launch.kubernetes.pod_patch")
    if not isinstance(patch, dict):
        return ()
    env_from = tuple(cast("list[str]", view.get("launch.env_from") or []))
    return pod_patch_errors(patch, view.text("launch.kubernetes.gpu_resource"), env_from)


def _environment(view: DocumentView) -> Iterable[Diagnostic]:
    env = cast(JsonObject, view.get("launch.env") or {})
    for index, variable in enumerate(cast("list[str]", view.get("launch.env_from") or [])):
        if variable in env:
            yield found(
                "SW1211",
                ("launch", "env_from", index),
                f"{variable} is in launch.env and in launch.env_from",
                "Keep one: env stores the value, env_from passes it through.",
            )


def _epochs(view: DocumentView) -> Iterable[Diagnostic]:
    if view.get("training.epochs") is not None and view.get("data.kind") == "synthetic":
        message = "synthetic data has no end, so there are no epochs of it"
        yield found("SW1210", "training.epochs", message, "Give `steps` or `tokens`.")


_LAYOUT = ("cluster.nodes", "cluster.gpus_per_node", *_DEGREES, _CONTEXT)

CHECKS: tuple[CrossCheck, ...] = (
    _exactly_one("model", ("source", "config"), "source: org/name"),
    _exactly_one("training", ("steps", "tokens", "epochs"), "steps: 1000"),
    _at_most_one("training.scheduler", "warmup_steps", "warmup_ratio"),
    _at_most_one("training.scheduler", "min_lr", "min_lr_ratio"),
    CrossCheck(keys=("model.weights", "model.config"), find=_weights),
    CrossCheck(keys=("model.trust_remote_code", "model.source"), find=_check_trust_remote_code),
    CrossCheck(keys=_LAYOUT, find=_check_world_size),
    CrossCheck(
        keys=(*_LAYOUT, "training.global_batch_size", "parallelism.micro_batch_size"), find=_batch
    ),
    CrossCheck(
        keys=(
            "training.scheduler.name",
            "training.scheduler.warmup_steps",
            "training.scheduler.decay_steps",
            "training.steps",
            "training.tokens",
            "training.global_batch_size",
            "training.sequence_length",
        ),
        find=_schedule,
    ),
    CrossCheck(keys=("training.scheduler.min_lr", "training.optimizer.lr"), find=_min_lr),
    CrossCheck(
        keys=("training.gradient_accumulation_dtype", "training.precision"), find=_accumulation
    ),
    CrossCheck(keys=("cluster.nodes", "training.days_at_most"), find=_auto_nodes),
    CrossCheck(keys=("launch.launcher", *_SCHEDULERS), find=_schedulers),
    CrossCheck(keys=("launch.slurm.extra",), find=_slurm),
    CrossCheck(keys=("launch.kubernetes", "launch.env_from"), find=_kubernetes),
    CrossCheck(keys=("launch.kubernetes", "launch.env_from"), find=_pod_patch),
    CrossCheck(keys=("launch.env", "launch.env_from"), find=_environment),
    CrossCheck(keys=("training.epochs", "data.kind"), find=_epochs),
    _exactly_one("validation", ("fraction", "kind"), "fraction: 0.01"),
    CrossCheck(
        keys=ISLAND_KEYS, find=lambda view: island_key_errors(view.document), all_islands=True
    ),
)
