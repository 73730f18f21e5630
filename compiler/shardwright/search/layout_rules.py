"""The layout rules: one small function each, from a layout to a Diagnostic or None.

Lines are of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import rank_axes, value_text
from shardwright.layout.formats import FORMATS, sums_are_rounded
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Candidate
from shardwright.layout.stage_balancing import (
    max_decoder_layers_per_stage,
    max_stages,
    too_few_layers_error,
)
from shardwright.layout.tensor_parallel_map import divisibility_errors
from shardwright.layout.zero_settings import fits_in_host_memory, offloaded_bytes
from shardwright.models.expert_modules import experts_per_layer
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_support import supports_chunked_loss
from shardwright.recipe.literal_types import CHECKPOINTING, PartialCheckpointing, Precision
from shardwright.utils.divisors import degree_mismatch, nearest_divisors, nearest_multiples

# What a GPU computes in. Of the recipe and the cluster alone, so that `check` can ask, too.


def missing_peak_error(precision: Precision, cluster: Cluster) -> Diagnostic | None:
    if precision in cluster.gpu.peak_flops:
        return None
    return found(
        "SW3118",
        "training.precision",
        f"gpu {cluster.gpu.name} has no {precision} peak",
        (
            "Choose a precision that the GPU computes in, or give its peak in an inline gpu's "
            "peak_tflops."
        ),
        tuple(name for name in cluster.gpu.peak_flops if name in FORMATS),
    )


def fp16_on_cpu_error(precision: Precision, cluster: Cluster) -> Diagnostic | None:
    if FORMATS[precision].cpu or not cluster.gpu.is_cpu:
        return None
    return found(
        "SW3119",
        "training.precision",
        f"DeepSpeed does not run precision {precision} on a CPU",
        "Write precision: bf16 or fp32, or set cluster.gpu to a GPU.",
        tuple(name for name, row in FORMATS.items() if row.cpu),
    )


SLOW_LINK_BYTES_PER_SECOND = 200e9 / 8  # 200 Gb/s


def degrees_multiply_to_world_size(x: Candidate) -> Diagnostic | None:
    """dp = world / (tp pp) (pipe/module.py:174)."""
    s, world = x.strategy, x.cluster.world_size
    pinned = [
        axis.name
        for axis in rank_axes()
        if axis.is_auto_by_default and axis.pin(x.recipe) is not None
    ]
    wrong = degree_mismatch(s.degrees(), world, complete=True, blamed=pinned)
    if wrong is None:
        return None
    culprit, near = wrong
    shown = [
        f"{a.name} {s.degrees()[a.name]}"
        for a in rank_axes()
        if a.is_auto_by_default or s.degrees()[a.name] != a.off_value
    ]
    return found(
        "SW3101",
        f"parallelism.{culprit}",
        (
            f"{' x '.join(shown)} = {s.world_size}, but {x.cluster.nodes} nodes x "
            f"{x.cluster.gpus_per_node} GPUs = {world}"
        ),
        (
            "The product must be the number of GPUs; leave tensor, pipeline or data at auto to "
            "have it computed."
        ),
        near,
    )


def batch_is_divisible(x: Candidate) -> Diagnostic | None:
    """DeepSpeed asserts train_batch = micro x accumulation x dp (runtime/config.py:925)."""
    s, size = x.strategy, x.recipe.training.global_batch_size
    if s.micro_batch_size * s.gradient_accumulation_steps * s.data == size:
        return None
    return found(
        "SW3102",
        "training.global_batch_size",
        (
            f"global_batch_size {size} is not a multiple of micro_batch_size {s.micro_batch_size} "
            f"x data {s.data}"
        ),
        "Gradient accumulation takes whole micro-batches on every data rank.",
        nearest_multiples(s.micro_batch_size * s.data, size),
    )


def tensor_divides_heads(x: Candidate) -> Diagnostic | None:
    """Refuse tensor degrees that do not divide the attention heads."""
    return _indivisible(x, "SW3103")


def tensor_divides_key_value_heads(x: Candidate) -> Diagnostic | None:
    """A degree beyond the key/value heads must be a multiple of them."""
    return _indivisible(x, "SW3104")


def tensor_divides_feed_forward(x: Candidate) -> Diagnostic | None:
    """Shards of a feed-forward matrix are equal."""
    return _indivisible(x, "SW3105")


def tensor_divides_experts(x: Candidate) -> Diagnostic | None:
    return _indivisible(x, "SW3126")


def _indivisible(x: Candidate, code: str) -> Diagnostic | None:
    return next(
        (d for d in divisibility_errors(x.graph, x.strategy.tensor) if d.code == code), None
    )


def stages_have_layers(x: Candidate) -> Diagnostic | None:
    """A stage holds at least one layer; embedding and head count as one each, layers that share
    something as one."""
    if max_stages(x.graph) >= x.strategy.stages:
        return None
    return too_few_layers_error(x.graph, x.strategy)


def partial_checkpointing_layers(x: Candidate) -> Diagnostic | None:
    """{full: N} counts layers of each stage. Stages are cut by time and memory, so one may have a
    few fewer than the others: it recomputes all of them. More than an even share would mean
    `full`."""
    s, choice = x.strategy, x.strategy.activation_checkpointing
    share = max_decoder_layers_per_stage(x.graph, s) * (s.total_stages // s.stages)
    if not isinstance(choice, PartialCheckpointing) or choice.full <= share:
        return None
    stages = (
        f"spread evenly {s.stages} stages have {share} each, or fewer"
        if s.stages > 1
        else f"the model has {share}"
    )
    return found(
        "SW3135",
        "parallelism.activation_checkpointing",
        (
            f"activation_checkpointing {choice} recomputes {choice.full} layers of a stage, but "
            f"{stages}"
        ),
        f"Write full to recompute every layer, or {{full: N}} with N below {share}.",
    )


def dualpipev_needs_pipeline(x: Candidate) -> Diagnostic | None:
    if x.strategy.schedule != "dualpipev" or x.strategy.pipeline > 1:
        return None
    return found(
        "SW3110",
        "parallelism.schedule",
        "schedule dualpipev with pipeline 1: there is no pipeline to schedule",
        "Use schedule: 1f1b, or pipeline: 2 or more.",
    )


def tensor_group_in_node(x: Candidate) -> Diagnostic | None:
    """Ranks are placed so that a tensor group fills part of one node, or of one NVLink domain."""
    t, slots = x.strategy.tensor, x.cluster.scale_up_gpus
    if slots % t == 0:
        return None
    of = "a node" if slots == x.cluster.gpus_per_node else "an NVLink domain"
    return found(
        "SW3112",
        "parallelism.tensor",
        (
            f"tensor {t} does not divide the {slots} GPUs of {of}, so a tensor group would "
            f"cross {of.partition(' ')[2]}s"
        ),
        f"Use a tensor degree that divides {slots}. Tensor ranks exchange activations in every "
        "layer, which is slow between nodes.",
        nearest_divisors(slots, t),
    )


def nodes_fill_nvlink_domains(x: Candidate) -> Diagnostic | None:
    """Warn where the fewest NVLink domains that hold the nodes would hold unequal numbers of them.

    Groups of ranks are then priced, and placed, over smaller domains of as many nodes each.
    """
    c = x.cluster
    nodes_per_domain = max(1, c.nvlink_gpus // c.gpus_per_node)
    fewest = -(-c.nodes // nodes_per_domain)
    if nodes_per_domain == 1 or c.nvlink_domains <= fewest:
        return None
    near = nearest_multiples(fewest, c.nodes)
    return found(
        "SW3129",
        "cluster.nodes",
        f"{c.nodes} nodes do not divide evenly over {fewest} NVLink domains of {c.nvlink_gpus} "
        f"GPUs: the plan uses {c.nvlink_domain_gpus} GPUs of each domain",
        f"Use {' or '.join(map(str, near))} nodes: each domain then holds as many, and larger "
        "groups of ranks stay inside one.",
        near,
        severity="warning",
    )


def tensor_parallel_styles(x: Candidate) -> Diagnostic | None:
    """Refuse tensor parallelism of types that are not verified against one process
    (models/tensor_verified.json)."""
    if x.strategy.tensor == 1 or x.graph.tensor_parallel_kind:
        return None
    return found(
        "SW3123",
        "parallelism.tensor",
        f"tensor {x.strategy.tensor}: model_type {x.graph.model_type!r} is not cut over tensor "
        f"ranks: {x.graph.tensor_parallel_reason}",
        "Use tensor: 1; pipeline and ZeRO run this type.",
        (1,),
    )


def chunked_loss_verified(x: Candidate) -> Diagnostic | None:
    """Refuse a chunked loss of types whose head is not verified to run on some tokens alone
    (models/chunked_loss_types.json)."""
    if (
        not x.graph.task_traits.chunked_loss
        or x.recipe.model.loss != "chunked"
        or supports_chunked_loss(x.graph.model_type)
    ):
        return None
    return found(
        "SW1431",
        "model.loss",
        f"the chunked loss is not proved for model_type {x.graph.model_type!r}",
        "Write `loss: auto`, which keeps the logits of this type whole.",
        ("auto", "full"),
    )


def layer_drop_supported(x: Candidate) -> Diagnostic | None:
    """Skipping layers at random: a stage cannot skip what another one sends, and ZeRO-3 hangs where
    data ranks, each with its own numbers, gather different layers. Ordinary dropout runs under
    every layout (parallel/tensor_parallel_collectives.py)."""
    s = x.strategy
    name = next((k for k in ("layerdrop", "decoder_layerdrop") if x.graph.config.get(k)), None)
    if name is None or (s.pipeline == 1 and s.zero_stage < 3):
        return None
    return found(
        "SW3113",
        "parallelism.pipeline" if s.pipeline > 1 else "parallelism.zero_stage",
        (
            f"{name} {x.graph.config[name]} skips layers at random, which a pipeline and "
            "zero_stage 3 cannot"
        ),
        f"Set {name} to 0 in model.config, or use pipeline: 1 with a zero_stage below 3.",
    )


def half_precision_accumulation(x: Candidate) -> Diagnostic | None:
    """bf16 has eight bits of precision, so a long sum of micro-batches loses the small ones."""
    training = x.recipe.training
    if not sums_are_rounded(training):
        return None
    if x.strategy.gradient_accumulation_steps == 1:
        return None
    return found(
        "SW3121",
        "training.gradient_accumulation_dtype",
        (
            f"{x.strategy.gradient_accumulation_steps} micro-batches are summed in "
            f"{training.gradient_accumulation_dtype}"
        ),
        "gradient_accumulation_dtype: fp32 loses nothing, for two more bytes a parameter.",
        severity="warning",
    )


def axes_are_runnable(x: Candidate) -> Diagnostic | None:
    """Axes that no engine here runs. Of those that are not even priced nothing is said: neither
    time nor memory."""
    known = ENGINES[x.recipe.target].axes
    wrong = {
        a: v
        for a, v in x.strategy.enabled_axes()
        if not a.has_cost_model or not (a.in_every_engine or a.name in known)
    }
    if not wrong:
        return None
    plain = [f"{axis.name}: {str(axis.off_value).lower()}" for axis in wrong]
    able = next((e.name for e in ENGINES.values() if {a.name for a in wrong} <= e.axes), "")
    named = ", ".join(f"{axis.name} {str(value).lower()}" for axis, value in wrong.items())
    priced = (
        "" if all(axis.has_cost_model for axis in wrong) else ", which has no numbers for it either"
    )
    return found(
        "SW3115",
        f"parallelism.{next(iter(wrong)).name}",
        f"{named} cannot run under target: {x.recipe.target}{priced}",
        f"Use {' and '.join(plain)}{f', or `target: {able}`' * bool(able)}.",
    )


def moe_without_expert_parallelism(x: Candidate) -> Diagnostic | None:
    """A mixture of experts without expert ranks: what an engine lacks, or a recipe does not ask
    for."""
    experts = experts_per_layer(x.graph)
    if experts < 2 or x.strategy.expert > 1:
        return None
    has = "expert" in ENGINES[x.recipe.target].axes
    help = (
        "`expert: N` spreads them over ranks, and"
        if has
        else "An engine that spreads experts over ranks"
    )
    return found(
        "SW3132",
        "parallelism.expert",
        (
            f"{experts} experts a layer without expert "
            f"parallelism{'' if has else ', which this version unsupported_reason'}"
        ),
        "Every data-parallel rank holds all experts of its layers, or gathers them (ZeRO-3), and "
        f"all figures are for that. {help} may take much less time and memory.",
        severity="warning",
    )


def learned_positions_cover_sequence(x: Candidate) -> Diagnostic | None:
    """A learned table has no row for a later position. It stands in the embedding layer, beside the
    tokens' table."""
    length, most = x.recipe.training.sequence_length, x.graph.max_positions
    if most is None or length <= most or not _has_position_table(x.graph):
        return None
    return found(
        "SW3116",
        "training.sequence_length",
        f"sequence_length {length} exceeds the model's {most} learned position embeddings",
        f"Use sequence_length <= {most}. A model without pretrained weights can have more "
        "positions: raise max_position_embeddings (n_positions for some types) in model.config.",
        (most,),
    )


def rotary_positions_trained(x: Candidate) -> Diagnostic | None:
    """Rotary positions go on beyond what the model was trained for, at some loss of quality."""
    length, most = x.recipe.training.sequence_length, x.graph.max_positions
    if most is None or length <= most or _has_position_table(x.graph):
        return None
    return found(
        "SW3117",
        "training.sequence_length",
        f"sequence_length {length} is longer than the model's max_position_embeddings {most}",
        (
            "It runs, but positions beyond that were never trained; set the model's rope scaling "
            "if that is meant."
        ),
        (most,),
        severity="warning",
    )


def _has_position_table(graph: ModelGraph) -> bool:
    return any(p.shape[0] == graph.max_positions for p in graph.layers[0].parameters[1:])


def precision_has_peak(x: Candidate) -> Diagnostic | None:
    return missing_peak_error(x.recipe.training.precision, x.cluster)


def fp16_on_cpu(x: Candidate) -> Diagnostic | None:
    """Measured: DeepSpeed's CPU accelerator refuses fp16 at start."""
    return fp16_on_cpu_error(x.recipe.training.precision, x.cluster)


def zero_3_over_slow_links(x: Candidate) -> Diagnostic | None:
    """Parameters cross the links three times a micro-batch (DeepSpeed#6889, #7019, #2928)."""
    s, rate = x.strategy, x.cluster.inter_node_bytes_per_second
    if s.zero_stage < 3 or x.cluster.nvlink_domains == 1 or rate >= SLOW_LINK_BYTES_PER_SECOND:
        return None
    return found(
        "SW3120",
        "parallelism.zero_stage",
        f"zero_stage 3 over links of {rate * 8 / 1e9:.0f} Gb/s per GPU: more nodes may be slower",
        "A pipeline with zero_stage: 1 sends far less between nodes.",
        severity="warning",
    )


def model_is_causal(x: Candidate) -> Diagnostic | None:
    """Found by the probe. A plain Hugging Face run trains it the same way, so it is no error."""
    if x.graph.cut.causal:
        return None
    return found(
        "SW3130",
        "model",
        (
            f"a {x.graph.model_type!r} of this configuration sees later tokens: next-token "
            "prediction is no task for it"
        ),
        "Where the type has the key, set is_decoder: true in the model's configuration.",
        severity="warning",
    )


def modules_are_recomputed(x: Candidate) -> Diagnostic | None:
    """Refuse a list of recomputed modules under an engine that recomputes layers, or attention,
    whole: SW3195."""
    modules = x.strategy.recompute_modules
    if not modules or ENGINES[x.recipe.target].recompute_obstacle is not None:
        return None
    return found(
        "SW3195",
        "parallelism.activation_checkpointing",
        f"activation_checkpointing {value_text(modules)} recomputes single modules of a layer, "
        f"which target: {x.recipe.target} does not",
        "Write `target: megatron`, or activation_checkpointing: selective, full or {full: N}.",
        CHECKPOINTING,
    )


def modules_can_be_recomputed(x: Candidate) -> Diagnostic | None:
    """Refuse recomputed modules that the model, the layout or the installed version lacks:
    SW3196."""
    obstacle, modules = ENGINES[x.recipe.target].recompute_obstacle, x.strategy.recompute_modules
    if obstacle is None:
        return None
    reasons = {module: why for module in modules if (why := obstacle(x, module))}
    if not reasons:
        return None
    rest = tuple(module for module in modules if module not in reasons)
    return found(
        "SW3196",
        "parallelism.activation_checkpointing",
        "activation_checkpointing cannot recompute "
        + "; ".join(f"{module}: {why}" for module, why in reasons.items()),
        f"Write `activation_checkpointing: {value_text(rest) if rest else 'none'}`, or full.",
    )


def hf_loss_is_next_token(x: Candidate) -> Diagnostic | None:
    """Found by the probe: label smoothing, codebooks, image tokens, an auxiliary loss of the
    router."""
    if x.graph.cut.loss != "other":
        return None
    return found(
        "SW3131",
        "model",
        f"Hugging Face's own loss of a {x.graph.model_type!r} is another one",
        "The trainer's is next-token cross-entropy on the logits, for every type.",
        severity="warning",
    )


# The layout rules about states in host memory.


def offload_fits_host_memory(x: Candidate) -> Diagnostic | None:
    """A node that runs out of memory kills its ranks with signal 9 and no message."""
    if x.strategy.offload == "none":
        return None
    needed = offloaded_bytes(
        x.recipe.training.optimizer.name,
        x.strategy.offload,
        x.graph.total_parameters,
        x.cluster.nodes,
    )
    has = x.cluster.host_memory_bytes
    if has is None:
        return found(
            "SW3127",
            "parallelism.offload",
            f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory, "
            "whose size is unknown: cluster.host_memory_gib is not set",
            "Set cluster.host_memory_gib, and the compiler checks that the offloaded states fit.",
            severity="warning",
        )
    if fits_in_host_memory(has, needed):
        return None
    return found(
        "SW3127",
        "parallelism.offload",
        f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory, which "
        f"has {has / 2**30:.0f} GiB",
        (
            "The system would kill the ranks with signal 9. Use more nodes (each then keeps less), "
            "or offload: none."
        ),
    )
