"""Checks keys against each other, without the model and without the files.

Each check names the keys that it reads, and is skipped where one of them is wrong already: one
mistake gives one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.island_keys import (
    DEFAULT_OUTER_INTERVAL,
    island_count,
    single_island_document,
)
from shardwright.recipe.kubernetes_pod_patch import pod_patch_errors
from shardwright.recipe.learning_rate_schedules import DEFAULT_LR_END, OPTIONAL_KEYS, SCHEDULES
from shardwright.recipe.objectives import (
    OBJECTIVE_KEYS,
    OBJECTIVES,
    PREFERENCE_KIND,
    SCORING_TASK,
)
from shardwright.recipe.recipe_schema import join_with_or
from shardwright.recipe.recipe_types import FREE_DEGREES, optimizer_steps
from shardwright.recipe.sbatch_options import sbatch_option_errors
from shardwright.recipe.task_options import TASK_SERVICES, task_option_errors
from shardwright.utils.divisors import (
    context_degrees,
    degree_mismatch,
    nearest_divisors,
    nearest_multiples,
)
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


Find = Callable[[DocumentView], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """Holds a check. all_islands: it reads the recipe of all islands, not that of one."""

    keys: tuple[str, ...]
    find: Find
    all_islands: bool = False


CHECKS: list[CrossCheck] = []


def cross_check(*keys: str, all_islands: bool = False) -> Callable[[Find], Find]:
    """Register a function that yields the errors of these keys."""

    def register(find: Find) -> Find:
        CHECKS.append(CrossCheck(keys=keys, find=find, all_islands=all_islands))
        return find

    return register


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


def _check_exclusive_keys(section: str, names: tuple[str, ...], example: str = "") -> None:
    """Register a check that at most one of the keys is given; with `example` exactly one."""
    keys = tuple(f"{section}.{name}" for name in names)

    @cross_check(*keys)
    def exclusive_keys(view: DocumentView) -> Iterator[Diagnostic]:
        given = view.given(*keys)
        if example and not given and view.get(section) is not None:  # `validation` is optional
            message = f"`{section}` needs one of {join_with_or(names)}"
            yield found("SW1201", section, message, f"Add `{example}`.")
        if len(given) > 1:
            shown = " and ".join(f"`{key.rpartition('.')[2]}`" for key in given)
            message = f"`{section}` has {shown}; they exclude each other"
            yield found("SW1202", given[1], message, "Keep one of them.")


_check_exclusive_keys("model", ("source", "config"), "source: org/name")
_check_exclusive_keys("training", ("steps", "tokens", "epochs"), "steps: 1000")
_check_exclusive_keys("training.scheduler", ("warmup_steps", "warmup_ratio"))
_check_exclusive_keys("training.scheduler", ("min_lr", "min_lr_ratio"))
_check_exclusive_keys("validation", ("fraction", "kind"), "fraction: 0.01")


@cross_check("model.weights", "model.config")
def pretrained_weights(view: DocumentView) -> Iterator[Diagnostic]:
    if view.get("model.weights") == "pretrained" and view.get("model.config") is not None:
        message = "model.weights: pretrained needs model.source; a config has no weights"
        help = "Write `weights: random`, or give `source:` instead of `config:`."
        yield found("SW1209", "model.weights", message, help)


@cross_check("model.trust_remote_code", "model.source")
def trusted_code(view: DocumentView) -> Iterator[Diagnostic]:
    key, source = "model.trust_remote_code", view.get("model.source")
    trusted = view.get(key)
    if trusted is None or trusted == source:
        return
    if source is None:
        help = "Remove the key: model.config is data, and runs no code."
        yield found("SW1212", key, f"{key} is set, but model.source is not", help)
    else:
        help = (
            "If you have read that code and trust it, write the same text as model.source; else "
            "remove the key."
        )
        message = f"{key} {trusted!r} is not model.source {source!r}"
        yield found("SW1212", key, message, help, (str(source),))


_DEGREES = tuple(f"parallelism.{name}" for name in FREE_DEGREES)
"""Lists the free degrees; data is the last."""
_CONTEXT = "parallelism.context"
"""Names the degree that is not free: 1 in most recipes."""
_NVLINK = "cluster.nvlink_domain_gpus"
_LAYOUT = ("cluster.nodes", "cluster.gpus_per_node", _NVLINK, *_DEGREES, _CONTEXT)


def _context_is_off(view: DocumentView) -> bool:
    """Tell whether context parallelism is off: the free degrees alone make up the world size."""
    degree, length = view.number(_CONTEXT), view.get("training.sequence_length")
    if degree is None and isinstance(length, int):  # auto
        gpus = view.number("cluster.gpus_per_node") or 1
        degree = max(context_degrees(length, max(gpus, view.number(_NVLINK) or 1)))
    return degree in (None, 1)


@cross_check(*_LAYOUT)
def world_size(view: DocumentView) -> Iterator[Diagnostic]:
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
        return None, ""  # the world does not divide: world_size's finding
    shown = " x ".join(f"{key.rpartition('.')[2]}={degrees[key]}" for key in _DEGREES[:-1])
    return data, f"data={data} (world {nodes * gpus} / ({shown}))"


@cross_check(*_LAYOUT, "training.global_batch_size", "parallelism.micro_batch_size")
def global_batch_size(view: DocumentView) -> Iterator[Diagnostic]:
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


@cross_check(
    "training.scheduler.warmup_steps",
    "training.scheduler.decay_steps",
    "training.steps",
    "training.tokens",
    "training.global_batch_size",
    "training.sequence_length",
)
def learning_rate_schedule(view: DocumentView) -> Iterator[Diagnostic]:
    scheduler = "training.scheduler"
    length = ("steps", "tokens", "global_batch_size", "sequence_length")
    steps = optimizer_steps(*(view.number(f"training.{key}") for key in length))
    warmup, decay = (
        view.number(f"{scheduler}.warmup_steps") or 0,
        view.number(f"{scheduler}.decay_steps"),
    )
    if warmup and steps is not None and warmup >= steps:
        message = f"warmup_steps {warmup} is not less than the {steps} training steps"
        yield found(
            "SW1205",
            f"{scheduler}.warmup_steps",
            message,
            f"Give fewer than {steps} steps, or warmup_ratio.",
        )
    if decay is not None and steps is not None and warmup < steps < warmup + decay:
        message = f"warmup_steps {warmup} and decay_steps {decay} exceed the {steps} training steps"
        yield found(
            "SW1205", f"{scheduler}.decay_steps", message, f"Give at most {steps - warmup}."
        )


_SCHEDULE = "training.scheduler"
_OF_SOME_SCHEDULES = ("min_lr", "min_lr_ratio", "decay_steps", *OPTIONAL_KEYS)
_MISSING_KEYS = {
    "decay_steps": (
        "decay_steps, the number of last steps over which the learning rate falls",
        "Add `decay_steps:`; a tenth of the steps is common.",
    ),
    "min_lr": (
        "min_lr or min_lr_ratio, its lowest learning rate",
        "Add `min_lr_ratio: 0.1`, or write `name: cosine`, which falls to 0.",
    ),
}


@cross_check(f"{_SCHEDULE}.name", *(f"{_SCHEDULE}.{key}" for key in _OF_SOME_SCHEDULES))
def keys_of_the_schedule(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that the schedule has the keys that it needs, and none that it does not take."""
    name = view.text(f"{_SCHEDULE}.name")
    row = SCHEDULES[name]
    if row.needs and not view.given(*(f"{_SCHEDULE}.{key}" for key in row.needs)):
        what, help = _MISSING_KEYS[row.needs[0]]
        yield found("SW1205", f"{_SCHEDULE}.name", f"the {name} schedule needs {what}", help)
    for key in _OF_SOME_SCHEDULES:
        takers = [other for other, schedule in SCHEDULES.items() if key in schedule.keys]
        is_default = view.get(f"{_SCHEDULE}.{key}") == OPTIONAL_KEYS.get(key)
        if takers and name not in takers and not is_default:
            yield found(
                "SW1205",
                f"{_SCHEDULE}.{key}",
                f"{key} has no effect with the {name} schedule",
                f"Remove it, or write `name: {takers[0]}`."
                if len(takers) == 1
                else f"Remove it, or take a schedule that has it: {join_with_or(takers)}.",
            )


@cross_check(
    f"{_SCHEDULE}.name",
    f"{_SCHEDULE}.min_lr",
    f"{_SCHEDULE}.lr_end",
    "training.optimizer.lr",
)
def lowest_learning_rate(view: DocumentView) -> Iterator[Diagnostic]:
    high = view.real("training.optimizer.lr")
    low, end = view.real(f"{_SCHEDULE}.min_lr"), view.real(f"{_SCHEDULE}.lr_end")
    if low is not None and high is not None and low > high:
        message = f"min_lr {low:g} is above optimizer.lr {high:g}"
        yield found("SW1205", f"{_SCHEDULE}.min_lr", message, f"Give at most {high:g}.")
    if high is None or view.text(f"{_SCHEDULE}.name") != "polynomial":
        return
    if (low := DEFAULT_LR_END if end is None else end) >= high:
        default = "" if end is not None else ", the default,"
        yield found(
            "SW1205",
            f"{_SCHEDULE}.{'name' if end is None else 'lr_end'}",
            f"lr_end {low:g}{default} is not below optimizer.lr {high:g}",
            f"Give an lr_end below {high:g}; 0 lets the rate fall to nothing.",
        )


@cross_check("training.objective.name", *(f"training.objective.{key}" for key in OBJECTIVE_KEYS))
def objective_keys(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that the objective takes the keys that are given."""
    name = view.text("training.objective.name")
    for key in view.given(*(f"training.objective.{key}" for key in OBJECTIVE_KEYS)):
        own = key.rpartition(".")[2]
        if own not in OBJECTIVES[name].defaults:
            owners = [each for each, traits in OBJECTIVES.items() if own in traits.defaults]
            message = f"{key} has no effect with the objective {name}"
            help = f"Remove it, or write `name: {join_with_or(owners)}`."
            yield found("SW1227", key, message, help)


@cross_check("training.objective.name", "training.objective.teacher")
def distillation_has_a_teacher(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that an objective with a teacher names the teacher's file."""
    name = view.text("training.objective.name")
    if OBJECTIVES[name].reads_teacher and view.get("training.objective.teacher") is None:
        yield found(
            "SW1253",
            "training.objective.teacher",
            f"the objective {name} needs what a teacher says of the data",
            "Write `teacher: FILE`, and run `shardwright score RECIPE --weights TEACHER --top 32 "
            "-o FILE` with this recipe and the teacher's folder.",
        )


@cross_check("training.objective.name", "data", "validation")
def objective_fits_data(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that preference objectives have preference data, and no others have."""
    name = view.text("training.objective.name")
    compares = OBJECTIVES[name].reads_preferences
    for key, part in _data_parts(view):
        kind = part["kind"]
        if (kind == PREFERENCE_KIND) == compares:
            continue
        pairs = [each for each, traits in OBJECTIVES.items() if traits.reads_preferences]
        if compares:
            help = f"Write `kind: {PREFERENCE_KIND}` with a file of prompts, chosen and rejected."
        else:
            help = f"Write `training: {{objective: {{name: {join_with_or(pairs)}}}}}`."
        message = f"the objective {name} does not train on {kind} data"
        yield found("SW1228", f"{key}.kind", message, help)


@cross_check("training.objective.name", "model.task")
def objective_fits_task(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that a reward model, and no other, is trained for sequence classification."""
    name, task = view.text("training.objective.name"), view.get("model.task")
    scores = OBJECTIVES[name].scores_sequences
    if task in (None, "auto") or scores == (task == SCORING_TASK):
        return
    owners = [each for each, traits in OBJECTIVES.items() if traits.scores_sequences]
    yield found(
        "SW1246",
        "model.task",
        f"the objective {name} does not train a model for {task}",
        "Leave `task` out."
        if scores
        else f"Leave `task` out, or write `training: {{objective: {{name: {owners[0]}}}}}`.",
    )


@cross_check("training.objective.name", "data", "validation")
def packed_pairs(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that an objective compares pairs where they are packed, and that all of them are."""
    name = view.text("training.objective.name")
    parts = [(key, part) for key, part in _data_parts(view) if part["kind"] == PREFERENCE_KIND]
    packed = [key for key, part in parts if part["packing"]]
    if packed and OBJECTIVES[name].reads_labels:
        pairs = [each for each, traits in OBJECTIVES.items() if traits.compares_pairs]
        yield found(
            "SW1263",
            f"{packed[0]}.packing",
            f"the objective {name} reads each completion with that of another prompt, and packing "
            "does not keep both in one sequence",
            f"Write `packing: false`, or an objective of pairs: {join_with_or(pairs)}.",
        )
    elif packed and len(packed) < len(parts):
        other = next(key for key, part in parts if not part["packing"])
        yield found(
            "SW1264",
            f"{other}.packing",
            f"the pairs of {packed[0]} are packed, and those of {other} are not: a batch cannot "
            "count sequences of both",
            "Write the same `packing` for all preference data, validation included.",
        )


def _data_parts(view: DocumentView) -> Iterator[tuple[str, JsonObject]]:
    """Yield (key, section) of the training and the validation data, or of each part of a
    mixture."""
    for name in ("data", "validation"):
        section = view.get(name)
        if not isinstance(section, dict):
            continue
        mixture = section.get("mixture")
        parts = (
            ((f"{name}.mixture.{number}", part) for number, part in enumerate(mixture))
            if isinstance(mixture, list)
            else ((name, section),)
        )
        for key, part in parts:
            if isinstance(part, dict) and isinstance(part.get("kind"), str):
                yield key, part


@cross_check("training.gradient_accumulation_dtype", "training.precision")
def gradient_accumulation_dtype(view: DocumentView) -> Iterator[Diagnostic]:
    """Check that gradients accumulate in the compute type or in fp32, as DeepSpeed does."""
    key, precision = "training.gradient_accumulation_dtype", view.text("training.precision")
    dtype, valid = view.get(key), tuple(dict.fromkeys(("auto", "fp32", precision)))
    if dtype is not None and dtype not in valid:
        message = f"gradient_accumulation_dtype {dtype} is not supported with precision {precision}"
        yield found("SW1206", key, message, f"Write {join_with_or(valid)}.", valid)


@cross_check("cluster.nodes", "training.days_at_most")
def automatic_nodes(view: DocumentView) -> Iterator[Diagnostic]:
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
        message = f"training.days_at_most has no effect: cluster.nodes is {nodes}"
        yield found(
            "SW1207", "training.days_at_most", message, "Remove it, or write `nodes: auto`."
        )


@cross_check(_NVLINK, "cluster.gpus_per_node")
def nvlink_domain(view: DocumentView) -> Iterator[Diagnostic]:
    domain, gpus = view.number(_NVLINK), view.number("cluster.gpus_per_node")
    if domain is None or gpus is None or domain % gpus == 0 or gpus % domain == 0:
        return
    several = nearest_multiples(gpus, domain)
    near = several if domain > gpus else nearest_divisors(gpus, domain)
    kind = "multiple" if domain > gpus else "divisor"
    message = f"nvlink_domain_gpus {domain} is not a {kind} of gpus_per_node {gpus}"
    help = (
        f"An NVLink domain has whole nodes, or a node has whole domains: "
        f"{join_with_or(tuple(map(str, near)))}."
    )
    yield found("SW1224", _NVLINK, message, help, near)


@cross_check("launch.launcher", "launch.slurm", "launch.kubernetes")
def schedulers(view: DocumentView) -> Iterator[Diagnostic]:
    launcher, given = view.get("launch.launcher"), view.given("launch.slurm", "launch.kubernetes")
    if launcher is None and len(given) > 1:
        message = "launcher: auto cannot choose between launch.slurm and launch.kubernetes"
        yield found("SW1208", given[1], message, "Keep one of them.")
    for section in given:
        name = section.rpartition(".")[2]
        if launcher not in (None, name):
            message = f"a {name} section has no effect with launcher: {launcher}"
            yield found("SW1208", section, message, f"Remove it, or write `launcher: {name}`.")
    if launcher == "kubernetes" and view.get("launch.kubernetes") is None:
        message = "launcher: kubernetes needs launch.kubernetes, with the pods' image and volume"
        help = (
            "Add `kubernetes: {image: ..., volume_claim: ..., directory: /shared/...}` under "
            "`launch`."
        )
        yield found("SW1201", "launch.launcher", message, help)


@cross_check("launch.launcher", "launch.task", "cluster.gpu")
def task_keys(view: DocumentView) -> Iterable[Diagnostic]:
    launcher, given = view.get("launch.launcher"), view.get("launch.task") is not None
    services = tuple(TASK_SERVICES)
    if launcher not in TASK_SERVICES:
        if given:
            message = f"a task section has no effect with launcher: {launcher or 'auto'}"
            help = f"Remove it, or write `launcher: {join_with_or(services)}`."
            yield found("SW1208", "launch.task", message, help)
        return
    launcher = str(launcher)
    if not given:
        message = f"launcher: {launcher} needs launch.task, with the folder on the nodes"
        help = "Add `task: {directory: /shared/..., gpu: H100}` under `launch`."
        yield found("SW1201", "launch.launcher", message, help)
        return
    if view.get("cluster.gpu") != "cpu" and view.get("launch.task.gpu") is None:
        message = f"launch.task.gpu: {TASK_SERVICES[launcher]} has its own names of GPUs"
        help = "Write the name under which it lists the GPU of cluster.gpu, such as `gpu: H100`."
        yield found("SW1256", "launch.task", message, help)
    options = view.get("launch.task.options")
    if isinstance(options, dict):
        yield from task_option_errors(options, launcher)


@cross_check("launch.recovery", "cluster.nodes", "cluster.islands", all_islands=True)
def recovery_keys(view: DocumentView) -> Iterator[Diagnostic]:
    if view.get("launch.recovery") is None:
        return
    if island_count(view.document) > 1:
        message = "launch.recovery has no effect with cluster.islands: an island ends by itself"
        help = "Remove it; `run --island K` is started again by hand and takes a member's state."
        yield found("SW1229", "launch.recovery", message, help)
        return
    fewest, nodes = view.number("launch.recovery.min_nodes"), view.number("cluster.nodes")
    if fewest is None or nodes is None:
        return
    key = "launch.recovery.min_nodes"
    if fewest > nodes:
        message = f"{key} is {fewest}, but cluster.nodes is {nodes}"
        yield found("SW1229", key, message, f"Give a number from 1 to {nodes}, or `auto`.")
    elif fewest < nodes and view.get("cluster.shared_filesystem") is False:
        message = (
            f"{key} is {fewest} of {nodes}, but without a shared file system the other hosts would "
            "not have the new plan"
        )
        help = "Remove min_nodes, or put the folder on a shared file system."
        yield found("SW1229", key, message, help)


@cross_check(
    "checkpoint.in_memory", "checkpoint.in_memory_every", "cluster.islands", all_islands=True
)
def memory_copy_keys(view: DocumentView) -> Iterator[Diagnostic]:
    if view.get("checkpoint.in_memory") is True:
        if island_count(view.document) > 1:
            message = "checkpoint.in_memory has no effect with cluster.islands"
            help = "Remove it: an island that is started again takes a member's state."
            yield found("SW1249", "checkpoint.in_memory", message, help)
    elif view.number("checkpoint.in_memory_every") is not None:
        key = "checkpoint.in_memory_every"
        message = f"{key} has no effect without checkpoint.in_memory"
        yield found("SW1249", key, message, "Write `in_memory: true`, or remove it.")


@cross_check("launch.slurm.extra")
def sbatch_options(view: DocumentView) -> Iterable[Diagnostic]:
    extra = view.get("launch.slurm.extra")
    return () if extra is None else sbatch_option_errors(extra)


@cross_check("launch.kubernetes", "launch.env_from")
def kubernetes_keys(view: DocumentView) -> Iterator[Diagnostic]:
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


@cross_check("launch.kubernetes", "launch.env_from")
def pod_patch(view: DocumentView) -> Iterable[Diagnostic]:
    patch = view.get("launch.kubernetes.pod_patch")
    if not isinstance(patch, dict):
        return ()
    env_from = tuple(cast("list[str]", view.get("launch.env_from") or []))
    return pod_patch_errors(patch, view.text("launch.kubernetes.gpu_resource"), env_from)


@cross_check("launch.env", "launch.env_from")
def environment(view: DocumentView) -> Iterator[Diagnostic]:
    env = cast(JsonObject, view.get("launch.env") or {})
    for index, variable in enumerate(cast("list[str]", view.get("launch.env_from") or [])):
        if variable in env:
            yield found(
                "SW1211",
                ("launch", "env_from", index),
                f"{variable} is in launch.env and in launch.env_from",
                "Keep one: env stores the value, env_from passes it through.",
            )


@cross_check("training.epochs", "data.kind")
def epochs(view: DocumentView) -> Iterator[Diagnostic]:
    if view.get("training.epochs") is not None and view.get("data.kind") == "synthetic":
        message = "training.epochs needs data with an end, and data.kind is synthetic"
        yield found("SW1210", "training.epochs", message, "Give `steps` or `tokens`.")


ISLAND_KEYS = (
    "cluster.islands",
    "cluster.inter_island_gbits_per_second",
    "cluster.nodes",
    "training.global_batch_size",
    "training.outer",
    "checkpoint.every_steps",
    "validation.every_steps",
    "launch.outer_store",
)
"""Lists the keys of DiLoCo islands."""


@cross_check(*ISLAND_KEYS, all_islands=True)
def keys_of_one_island(view: DocumentView) -> Iterator[Diagnostic]:
    if island_count(view.document) > 1:
        return
    keys = ("cluster.inter_island_gbits_per_second", "training.outer", "launch.outer_store")
    for key in view.given(*keys):
        message = f"{key} has no effect: the recipe has one island"
        help = "Remove it, or write `cluster.islands:` with more than one."
        yield found("SW1232", key, message, help)


@cross_check(*ISLAND_KEYS, all_islands=True)
def island_division(view: DocumentView) -> Iterator[Diagnostic]:
    islands = island_count(view.document)
    if islands == 1:
        return
    if view.get("cluster.nodes") is None:
        message = "cluster.nodes: auto is not supported with several islands"
        help = "Give the number of nodes of all islands together."
        yield found("SW1232", "cluster.nodes", message, help)
    for key in ("cluster.nodes", "training.global_batch_size"):
        value = view.get(key)
        if isinstance(value, int) and value % islands:
            near = tuple(map(str, nearest_multiples(islands, value)))
            message = f"{key} {value} is not a multiple of {islands} islands"
            help = f"Each island has an equal part: {join_with_or(near)}."
            yield found("SW1231", key, message, help, near)


@cross_check(*ISLAND_KEYS, all_islands=True)
def island_links(view: DocumentView) -> Iterator[Diagnostic]:
    key = "inter_island_gbits_per_second"
    if island_count(view.document) > 1 and view.get(f"cluster.{key}") is None:
        message = f"cluster.islands needs cluster.{key}, the rate of the links between islands"
        help = f"Add `{key}:` under `cluster`: Gbit/s of each island's link, one direction."
        yield found("SW1232", "cluster.islands", message, help)


@cross_check(*ISLAND_KEYS, all_islands=True)
def steps_between_outer_steps(view: DocumentView) -> Iterator[Diagnostic]:
    if island_count(view.document) == 1:
        return
    every = view.number("training.outer.every_steps") or DEFAULT_OUTER_INTERVAL
    for key in ("checkpoint.every_steps", "validation.every_steps"):
        value = view.get(key)
        if isinstance(value, int) and value % every:
            near = tuple(map(str, nearest_multiples(every, value)))
            message = f"{key} {value} is not a multiple of training.outer.every_steps {every}"
            help = (
                "Between outer steps each island has weights of its own. Write "
                f"{join_with_or(near)}."
            )
            yield found("SW1233", key, message, help, near)
    steps, mixing = view.number("training.outer.overlap_steps") or 0, "training.outer.mixing"
    if steps >= every:
        message = f"training.outer.overlap_steps {steps} is not less than every_steps {every}"
        help = f"An outer step arrives before the next one begins: write at most {every - 1}."
        yield found("SW1235", "training.outer.overlap_steps", message, help, (every - 1,))
    elif not steps and view.get(mixing) is not None:
        message = f"{mixing} has no effect with overlap_steps 0"
        yield found("SW1235", mixing, message, "Remove it, or write `overlap_steps:` with more.")


@cross_check(*ISLAND_KEYS, all_islands=True)
def outer_optimizer(view: DocumentView) -> Iterator[Diagnostic]:
    if island_count(view.document) == 1:
        return
    optimizer = view.get("training.outer.optimizer") or "average"
    for key in ("training.outer.lr", "training.outer.momentum"):
        value = view.get(key)
        if optimizer == "nesterov" and value is None:
            message = f"training.outer.optimizer: nesterov needs `{key.rpartition('.')[2]}`"
            help = (
                "There is no value that fits all. The papers' best outer rate, at momentum 0.9, "
                "was about 0.4, 0.6, 0.6 and 0.8 for 1, 2, 4 and 8 islands (arXiv 2503.09799); "
                "plain averaging needs neither."
            )
            yield found("SW1235", "training.outer.optimizer", message, help)
        elif optimizer == "average" and value is not None:
            message = f"{key} has no effect with the outer optimizer average"
            yield found("SW1235", key, message, "Remove it, or write `optimizer: nesterov`.")
