"""Check Megatron-LM's arguments: what its parser and validate_args reject, and layouts that they
accept although Megatron-Core cannot run them. Line numbers are of megatron-core 0.19.0.

megatron-core 0.16, the newest for Python 3.11, has no parser to ask; a newer one is asked, too
(compiler/decisions/041).
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator

from shardwright.diagnostics import Diagnostic, Location, Severity, found
from shardwright.lint.megatron_script import Arguments, MegatronOption, options

Check = Callable[[Arguments], Iterator[Diagnostic]]
TENSOR, PIPELINE, CONTEXT = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
EXPERT, EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
VIRTUAL, PER_VIRTUAL = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
LAYOUT, LAYERS, EXPERTS = "--pipeline-model-parallel-layout", "--num-layers", "--num-experts"
GLOBAL, MICRO = "--global-batch-size", "--micro-batch-size"
PRECISION_AWARE = "--use-precision-aware-optimizer"
_UNEVEN = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)


def unknown_options(a: Arguments) -> Iterator[Diagnostic]:
    for given in a.given:
        if given.name in options():
            continue
        near = difflib.get_close_matches(given.name, options(), n=1, cutoff=0.8)
        help = (
            f"Did you mean `{near[0]}`?"
            if near
            else "Leave it out, unless your script adds it to the parser."
        )
        severity: Severity = "error" if near else "warning"
        message = f"`{given.name}` is not an option of Megatron-LM, whose parser stops at it"
        yield found("SW4901", given.place, message, help, severity=severity)


def wrong_values(a: Arguments) -> Iterator[Diagnostic]:
    for given in a.given:
        known = options().get(given.name)
        if known is None:
            continue
        required = (
            known.values if isinstance(known.values, int) else 1 if known.values == "+" else 0
        )
        if len(given.values) < required:
            message = f"`{given.name}` has no value"
            yield found("SW4902", given.place, message, "Write its value after it.", known.choices)
            continue
        for value in given.values:
            if value is None:
                continue
            if known.choices and value not in known.choices:
                message = f"{given.name}: {value} is not one of {', '.join(known.choices)}"
                yield found("SW4902", given.place, message, "Write one of them.", known.choices)
            elif not _has_type(known.kind, value):
                noun = {"int": "a whole number", "float": "a number"}[known.kind]
                message = f"{given.name} {value}: the parser takes {noun}"
                yield found("SW4902", given.place, message, f"Write {noun}.")


def _has_type(kind: str, value: str) -> bool:
    if kind == "int":
        return re.fullmatch(r"[+-]?\d+", value) is not None
    if kind == "float":
        try:
            return math.isfinite(float(value))
        except ValueError:
            return False
    return True


def ranks_do_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:430."""
    ranks = _product(a.integer(name, 1) for name in (TENSOR, PIPELINE, CONTEXT))
    if a.world_size is None or not ranks or a.world_size % ranks == 0:
        return
    message = f"tensor x pipeline x context = {ranks} ranks do not divide a world of {a.world_size}"
    yield found(
        "SW4911",
        _place(a, TENSOR, PIPELINE, CONTEXT),
        message,
        "Change a degree or the number of GPUs.",
    )


def batch_does_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/num_microbatches_calculator.py, ConstantNumMicroBatchesCalculator."""
    batch, micro, data = a.integer(GLOBAL), a.integer(MICRO), _data(a)
    if not batch or not micro or data is None or batch % (micro * data) == 0:
        return
    message = f"{GLOBAL} {batch} is not a multiple of {micro} x {data} data ranks"
    yield found("SW4912", _place(a, GLOBAL), message, f"Take a multiple of {micro * data}.")


def layers_do_not_divide(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:963."""
    layers, pipeline = a.integer(LAYERS), a.integer(PIPELINE, 1)
    if not layers or not pipeline or layers % pipeline == 0 or any(map(a.has, (LAYOUT, *_UNEVEN))):
        return
    message = f"{LAYERS} {layers} is not a multiple of {pipeline} pipeline ranks"
    help = f"Give the layers of each rank: {LAYOUT}, or {_UNEVEN[0]} and {_UNEVEN[1]}."
    yield found("SW4913", _place(a, LAYERS), message, help)


def layers_of_a_virtual_stage(a: Arguments) -> Iterator[Diagnostic]:
    """Check what the parser misses and transformer_block.py:169 asserts once the rank builds its
    layers."""
    layers, pipeline, virtual = a.integer(LAYERS), a.integer(PIPELINE, 1), a.integer(VIRTUAL)
    if (
        not layers
        or not pipeline
        or not virtual
        or layers % pipeline
        or any(map(a.has, (LAYOUT, *_UNEVEN)))
    ):
        return
    each = layers // pipeline
    if each % virtual:
        message = f"{VIRTUAL} {virtual} does not divide the {each} layers of a pipeline rank"
        valid = [n for n in range(1, each + 1) if each % n == 0]
        yield found(
            "SW4921", _place(a, VIRTUAL), message, f"Take a divisor of {each}, or {LAYOUT}.", valid
        )


def micro_batches_of_a_group(a: Arguments) -> Iterator[Diagnostic]:
    """Check schedules.py:1145: the interleaved schedule groups as many micro-batches as pipeline
    ranks."""
    batch, micro, pipeline, data = (
        a.integer(GLOBAL),
        a.integer(MICRO),
        a.integer(PIPELINE, 1),
        _data(a),
    )
    virtual, group = (
        _virtual(a),
        a.integer("--microbatch-group-size-per-virtual-pipeline-stage", pipeline),
    )
    if (
        not batch
        or not micro
        or not pipeline
        or not data
        or not group
        or not virtual
        or virtual == 1
    ):
        return
    count = batch // (micro * data)
    rest = count % group
    if count >= group >= pipeline and (rest == 0 or rest >= pipeline):
        return
    message = f"{count} micro-batches do not form groups of {group} over {pipeline} pipeline ranks"
    help = f"Take a {GLOBAL} that is a multiple of {micro * data * pipeline}."
    yield found("SW4922", _place(a, GLOBAL), message, help)


def experts_over_the_world(a: Arguments) -> Iterator[Diagnostic]:
    """Check parallel_state.py:882: expert ranks are taken from all ranks of a pipeline stage."""
    expert, tensor, pipeline = a.integer(EXPERT, 1), a.integer(TENSOR, 1), a.integer(PIPELINE, 1)
    ranks = _product((expert, a.integer(EXPERT_TENSOR, tensor), pipeline))
    if a.world_size is None or expert == 1 or not ranks or a.world_size % ranks == 0:
        return
    message = (
        f"expert-tensor x expert x pipeline = {ranks} ranks do not divide a world of {a.world_size}"
    )
    help = f"Take a smaller {EXPERT}, or {EXPERT_TENSOR} 1."
    yield found("SW4923", _place(a, EXPERT), message, help)


def experts_without_sequence(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/transformer/moe/moe_layer.py:629, which fails in the first forward
    pass."""
    tensor = a.integer(TENSOR, 1)
    if not tensor or tensor == 1 or not a.certain(EXPERTS) or not a.lacks("--sequence-parallel"):
        return
    message = f"{EXPERTS} with {tensor} tensor ranks needs sequence parallelism"
    yield found("SW4924", _place(a, EXPERTS), message, "Add --sequence-parallel.")


HEADS, HIDDEN, SEQUENCE = "--num-attention-heads", "--hidden-size", "--seq-length"
POSITIONS, RECOMPUTE = "--max-position-embeddings", "--recompute-granularity"
WARMUP, OVERLAP = "--lr-warmup-fraction", "--overlap-param-gather"
DISTRIBUTED = ("--use-distributed-optimizer", "--use-megatron-fsdp", "--optimizer")


def half_precisions(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1182."""
    fp16 = a.certain("--fp16")
    if fp16 and a.certain("--bf16"):
        message = "--fp16 and --bf16 are both given"
        yield found("SW4931", fp16.place, message, "Remove one; take --bf16 where the GPU has it.")


def heads_of_a_hidden_size(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1292."""
    hidden, heads = a.integer(HIDDEN), a.integer(HEADS)
    if hidden and heads and hidden % heads and a.lacks("--kv-channels"):
        message = f"{HIDDEN} {hidden} is not a multiple of {heads} attention heads"
        help = f"Take a multiple of {heads}, or give --kv-channels: the size of a head."
        yield found("SW4932", _place(a, HIDDEN, HEADS), message, help)


def positions_below_the_sequence(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1314."""
    positions, length = a.integer(POSITIONS), a.integer(SEQUENCE)
    if positions and length and positions < length:
        message = f"{POSITIONS} {positions} is less than {SEQUENCE} {length}"
        yield found("SW4933", _place(a, POSITIONS), message, f"Write {POSITIONS} {length} or more.")


def iterations_and_samples(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1239 to 1257."""
    if a.has("--skip-train"):
        return
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        if not a.certain(f"--train-{unit}"):
            continue
        names = [f"--lr-decay-{other}", f"--lr-warmup-{other}"]
        names += [f"--train-{other}"] * (unit == "iters")  # once for the two
        for given in filter(None, map(a.certain, names)):
            if given.values and given.values[0] in ("0", None):
                continue
            message = f"{given.name} does not go with --train-{unit}"
            own = given.name.replace(other, unit)
            help = "Remove one." if own == f"--train-{unit}" else f"Write {own}."
            yield found("SW4934", given.place, message, help)


def two_warmups(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1246 and 1260."""
    given = a.certain(WARMUP)
    for other in ("--lr-warmup-iters", "--lr-warmup-samples"):
        if given and a.integer(other, 0) and a.certain(other):
            message = f"{WARMUP} and {other} are both given"
            yield found("SW4935", given.place, message, "Remove one.")


def selective_recomputation(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1374 and 1386."""
    given = a.certain("--recompute-method")
    granularity = a.text(RECOMPUTE)
    if granularity == "selective" and given:
        message = f"{given.name} does not go with {RECOMPUTE} selective"
        help = f"Remove it, or write {RECOMPUTE} full."
        yield found("SW4936", given.place, message, help)


def gather_without_sharding(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:991."""
    given = a.certain(OVERLAP)
    if given and a.lacks(*DISTRIBUTED):
        message = f"{OVERLAP} without {DISTRIBUTED[0]}"
        yield found("SW4937", given.place, message, f"Add {DISTRIBUTED[0]}.")


def gather_without_reduction(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:994."""
    given = a.certain(OVERLAP)
    if given and a.lacks("--overlap-grad-reduce"):
        message = f"{OVERLAP} without --overlap-grad-reduce"
        yield found("SW4938", given.place, message, "Add --overlap-grad-reduce.")


def host_optimizer_alone(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1804."""
    given = a.certain("--optimizer-cpu-offload")
    if given and a.lacks(PRECISION_AWARE):
        message = f"{given.name} without {PRECISION_AWARE}"
        yield found("SW4948", given.place, message, f"Add {PRECISION_AWARE}.")


def experts_over_expert_ranks(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1602."""
    experts, ranks = a.integer(EXPERTS), a.integer(EXPERT)
    if experts and ranks and experts % ranks:
        message = f"{EXPERTS} {experts} is not a multiple of {ranks} expert ranks"
        yield found("SW4939", _place(a, EXPERTS), message, f"Take a divisor of {experts}.")


def expert_ranks_without_experts(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1601."""
    ranks = a.integer(EXPERT)
    if ranks and ranks > 1 and a.lacks(EXPERTS):
        message = f"{EXPERT} {ranks} without {EXPERTS}"
        yield found("SW4940", _place(a, EXPERT), message, f"Add {EXPERTS}, or remove {EXPERT}.")


def sequence_over_context_ranks(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1296: each context rank holds two blocks of the sequence."""
    length, context = a.integer(SEQUENCE), a.integer(CONTEXT)
    if length and context and context > 1 and length % (2 * context):
        message = f"{SEQUENCE} {length} is not a multiple of 2 x {context} context ranks"
        yield found("SW4941", _place(a, SEQUENCE), message, f"Take a multiple of {2 * context}.")


def save_without_interval(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1322."""
    given = a.certain("--save")
    if given and a.lacks("--save-interval"):
        message = "--save without --save-interval"
        help = "Add --save-interval: the steps between two checkpoints."
        yield found("SW4942", given.place, message, help)


def virtual_stages_of_one_rank(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:968 and 972."""
    virtual = _virtual(a)
    if a.integer(PIPELINE, 1) == 1 and virtual and virtual > 1:
        name = VIRTUAL if a.has(VIRTUAL) else PER_VIRTUAL
        if a.has(name):
            message = f"{name} gives {virtual} virtual stages to a pipeline of one rank"
            help = f"Remove it, or give {PIPELINE} 2 or more."
            yield found("SW4943", _place(a, name), message, help)


def rates_in_order(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1320."""
    least, most = a.number("--min-lr"), a.number("--lr")
    if least is not None and most is not None and least > most:
        message = f"--min-lr {least:g} is above --lr {most:g}"
        yield found("SW4944", _place(a, "--min-lr"), message, f"Write at most {most:g}.")


def overlap_without_sequence(a: Arguments) -> Iterator[Diagnostic]:
    """Check arguments.py:1402."""
    given, tensor = a.certain("--tp-comm-overlap"), a.integer(TENSOR, 1)
    is_off = tensor == 1  # validate_args switches sequence parallelism off then
    if given and (is_off or a.lacks("--sequence-parallel")):
        message = "--tp-comm-overlap needs sequence parallelism"
        help = f"Give {TENSOR} 2 or more, and --sequence-parallel." if is_off else ""
        yield found("SW4945", given.place, message, help or "Add --sequence-parallel.")


def heads_over_tensor_ranks(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/transformer/transformer_config.py:1323, which the parser misses."""
    heads, tensor = a.integer(HEADS), a.integer(TENSOR)
    if heads and tensor and heads % tensor:
        message = f"{HEADS} {heads} is not a multiple of {tensor} tensor ranks"
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        help = f"Take a divisor of {heads} as {TENSOR}."
        yield found("SW4946", _place(a, HEADS), message, help, valid)


def experts_of_a_token(a: Arguments) -> Iterator[Diagnostic]:
    """Check megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function."""
    experts, chosen = a.integer(EXPERTS), a.integer("--moe-router-topk")
    if experts and chosen and chosen > experts:
        message = f"--moe-router-topk {chosen} is more than {EXPERTS} {experts}"
        help = f"Write at most {experts}."
        yield found("SW4947", _place(a, "--moe-router-topk"), message, help)


RULES: dict[str, Check] = {
    "SW4901": unknown_options,
    "SW4902": wrong_values,
    "SW4911": ranks_do_not_divide,
    "SW4912": batch_does_not_divide,
    "SW4913": layers_do_not_divide,
    "SW4921": layers_of_a_virtual_stage,
    "SW4922": micro_batches_of_a_group,
    "SW4923": experts_over_the_world,
    "SW4924": experts_without_sequence,
    "SW4931": half_precisions,
    "SW4932": heads_of_a_hidden_size,
    "SW4933": positions_below_the_sequence,
    "SW4934": iterations_and_samples,
    "SW4935": two_warmups,
    "SW4936": selective_recomputation,
    "SW4937": gather_without_sharding,
    "SW4938": gather_without_reduction,
    "SW4939": experts_over_expert_ranks,
    "SW4940": expert_ranks_without_experts,
    "SW4941": sequence_over_context_ranks,
    "SW4942": save_without_interval,
    "SW4943": virtual_stages_of_one_rank,
    "SW4944": rates_in_order,
    "SW4945": overlap_without_sequence,
    "SW4946": heads_over_tensor_ranks,
    "SW4947": experts_of_a_token,
    "SW4948": host_optimizer_alone,
}


def lint_arguments(a: Arguments) -> tuple[Diagnostic, ...]:
    """Return the findings by position in the file."""
    if not a.given and not a.has_command:
        first = Location(file=a.source.file, line=1, column=1)
        help = "Options stand as `--name value`; those before a .py file are the launcher's."
        return (found("SW4900", first, f"{a.source.file} holds no option of Megatron-LM", help),)
    told = [diagnostic for check in RULES.values() for diagnostic in check(a)]
    return tuple(sorted(told, key=operator.attrgetter("location.line", "location.column", "code")))


def ask_the_installed_parser(a: Arguments) -> tuple[tuple[Diagnostic, ...], tuple[str, ...]]:
    """Return what validate_args of the installed Megatron-LM refuses, and notes.

    It is asked only where every option is known, and where it is installed.
    """
    from shardwright.engines.megatron.installed_parser import (
        ask_installed_parser,
        is_parser_installed,
    )

    values = [value for given in a.given for value in (given.name, *given.values)]
    words = [value for value in values if value is not None]
    is_known = a.is_complete and len(words) == len(values)
    if not (a.world_size and is_known and all(given.is_certain for given in a.given)):
        return (), ()
    if any(given.name not in options() for given in a.given) or not is_parser_installed():
        return (), ()
    answer = ask_installed_parser(words, a.world_size)
    if "assertion" in answer:
        message = f"validate_args refuses the options: {answer['assertion']}"
        help = f"Read {answer['at']} of the installed Megatron-LM."
        return (found("SW4903", a.given[0].place, message, help),), ()
    cause = answer.get("unasked") or answer.get("error")
    asked = "the installed Megatron-LM's validate_args"
    return (), (f"{asked} could not answer: {cause}" if cause else f"{asked} accepts it",)


def _product(numbers: Iterator[int | None] | tuple[int | None, ...]) -> int | None:
    """Return the product; None where a factor is unknown."""
    known = list(numbers)
    return None if None in known else math.prod(n for n in known if n is not None)


def _data(a: Arguments) -> int | None:
    ranks = _product(a.integer(name, 1) for name in (TENSOR, PIPELINE, CONTEXT))
    return a.world_size // ranks if a.world_size and ranks and a.world_size % ranks == 0 else None


def _virtual(a: Arguments) -> int | None:
    """Return the stages of a pipeline rank; None where they are unknown."""
    layers, pipeline, each = a.integer(LAYERS), a.integer(PIPELINE, 1), a.integer(PER_VIRTUAL)
    layout = a.last(LAYOUT)
    if a.has(VIRTUAL):
        return a.integer(VIRTUAL)
    if layout is not None and pipeline:
        text = layout.values[0] if layout.values else None
        if text is None or "(" in text or "*" in re.sub(r"[Etm]\*", "", text):
            return None
        return (text.count("|") + 1) // pipeline
    if a.has(PER_VIRTUAL):
        return layers // pipeline // each if layers and pipeline and each else None
    return 1


def _place(a: Arguments, *names: str) -> Location:
    """Return the position of the first of these options in the file."""
    given: MegatronOption | None = next(
        (g for name in names if (g := a.last(name)) is not None), None
    )
    return given.place if given else Location(file=a.source.file, line=1, column=1)
