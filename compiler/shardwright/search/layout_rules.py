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
    own = tuple(name for name in cluster.gpu.peak_flops if name in FORMATS)
    choice = f"Choose precision {' or '.join(own)}" if own else "Use another GPU"
    return found(
        "SW3118",
        "training.precision",
        f"gpu {cluster.gpu.name} has no peak TFLOP/s for precision {precision}",
        f"{choice}, or describe a GPU that computes in {precision} under cluster.gpu, with its "
        f"peak_tflops.{precision}.",
        own,
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
    """Each GPU has one tensor, one pipeline, one context and one data rank, so these degrees
    multiply to the number of GPUs (DeepSpeed: pipe/module.py:174)."""
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
            "Change a degree so that the product is the number of GPUs, or leave tensor, pipeline "
            "or data at auto: the compiler then computes that degree."
        ),
        near,
    )


def batch_is_divisible(x: Candidate) -> Diagnostic | None:
    """In each gradient accumulation step every data rank takes one whole micro-batch, so the global
    batch is micro_batch_size x gradient accumulation steps x data (DeepSpeed:
    runtime/config.py:925)."""
    s, size = x.strategy, x.recipe.training.global_batch_size
    at_once = s.micro_batch_size * s.data
    if at_once * s.gradient_accumulation_steps == size:
        return None
    return found(
        "SW3102",
        "training.global_batch_size",
        (
            f"global_batch_size {size} is not a multiple of micro_batch_size {s.micro_batch_size} "
            f"x data {s.data} = {at_once}"
        ),
        f"Change global_batch_size to a multiple of {at_once}, or change micro_batch_size or data.",
        nearest_multiples(at_once, size),
    )


def tensor_divides_heads(x: Candidate) -> Diagnostic | None:
    """Each tensor rank computes an equal share of the attention heads."""
    return _indivisible(x, "SW3103")


def tensor_divides_key_value_heads(x: Candidate) -> Diagnostic | None:
    """A degree beyond the key/value heads must be a multiple of them."""
    return _indivisible(x, "SW3104")


def tensor_divides_feed_forward(x: Candidate) -> Diagnostic | None:
    """Shards of a feed-forward matrix are equal."""
    return _indivisible(x, "SW3105")


def tensor_divides_experts(x: Candidate) -> Diagnostic | None:
    """Each tensor rank holds an equal share of the feed-forward features of every expert."""
    return _indivisible(x, "SW3126")


def _indivisible(x: Candidate, code: str) -> Diagnostic | None:
    return next(
        (d for d in divisibility_errors(x.graph, x.strategy.tensor) if d.code == code), None
    )


def stages_have_layers(x: Candidate) -> Diagnostic | None:
    """Every stage holds at least one layer. The embedding and the head count as one layer each.
    Decoder layers that share parameters or state stay on one stage and count as one."""
    if max_stages(x.graph) >= x.strategy.stages:
        return None
    return too_few_layers_error(x.graph, x.strategy)


def partial_checkpointing_layers(x: Candidate) -> Diagnostic | None:
    """`{full: N}` recomputes the first N decoder layers of each stage, and all layers of a stage
    that has fewer. N is at most an even share of the decoder layers: `full` recomputes all."""
    s, choice = x.strategy, x.strategy.activation_checkpointing
    share = max_decoder_layers_per_stage(x.graph, s) * (s.total_stages // s.stages)
    if not isinstance(choice, PartialCheckpointing) or choice.full <= share:
        return None
    stages = (
        f"{x.graph.decoder_layers} decoder layers split evenly over {s.stages} stages are at most "
        f"{share} a stage"
        if s.stages > 1
        else f"the model has {share} decoder layers"
    )
    return found(
        "SW3135",
        "parallelism.activation_checkpointing",
        (
            f"activation_checkpointing {choice} recomputes {choice.full} layers of each stage, but "
            f"{stages}"
        ),
        f"Write `full` to recompute every layer, or `{{full: N}}` with N at most {share}.",
    )


def dualpipev_needs_pipeline(x: Candidate) -> Diagnostic | None:
    """DualPipeV is a pipeline schedule with two stages on each rank, so it needs a pipeline."""
    if x.strategy.schedule != "dualpipev" or x.strategy.pipeline > 1:
        return None
    return found(
        "SW3110",
        "parallelism.schedule",
        "schedule dualpipev with pipeline 1: there is no pipeline to schedule",
        "Use schedule: 1f1b, or pipeline: 2 or more.",
    )


def tensor_group_in_node(x: Candidate) -> Diagnostic | None:
    """Tensor ranks exchange activations in every layer, so each tensor group stays inside one node
    or NVLink domain. The degree must divide the number of GPUs there."""
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
    """The plan assigns the same number of nodes to every NVLink domain. Where the nodes do not
    divide evenly over the fewest domains that hold them, it assumes more and smaller domains."""
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
        f"GPUs: the plan assumes {c.nvlink_domains} domains of {c.nvlink_domain_gpus} GPUs",
        f"Use {' or '.join(map(str, near))} nodes: every NVLink domain then holds the same number "
        "of nodes, and larger groups of ranks stay inside one domain.",
        near,
        severity="warning",
    )


def tensor_parallel_styles(x: Candidate) -> Diagnostic | None:
    """Tensor parallelism is supported for the model types that train with tensor ranks as in a
    single-process run (models/tensor_verified.json)."""
    if x.strategy.tensor == 1 or x.graph.tensor_parallel_kind:
        return None
    return found(
        "SW3123",
        "parallelism.tensor",
        f"tensor {x.strategy.tensor} is not supported for model_type {x.graph.model_type!r}: "
        f"{x.graph.tensor_parallel_reason}",
        "Use tensor: 1.",
        (1,),
    )


def chunked_loss_verified(x: Candidate) -> Diagnostic | None:
    """A chunked loss computes the logits of a part of the tokens at a time. This is verified only
    for the model types in models/chunked_loss_types.json."""
    if (
        not x.graph.task_traits.chunked_loss
        or x.recipe.model.loss != "chunked"
        or supports_chunked_loss(x.graph.model_type)
    ):
        return None
    return found(
        "SW1431",
        "model.loss",
        f"the chunked loss is not verified for model_type {x.graph.model_type!r}",
        "Write `loss: auto` or `loss: full`, which compute all logits of a micro-batch at once for "
        "this type.",
        ("auto", "full"),
    )


def layer_drop_supported(x: Candidate) -> Diagnostic | None:
    """`layerdrop` and `decoder_layerdrop` skip layers at random. In a pipeline, a stage cannot skip
    activations that another stage sends. At ZeRO stage 3 data ranks skip different layers, and the
    run hangs where they gather weights."""
    s = x.strategy
    name = next((k for k in ("layerdrop", "decoder_layerdrop") if x.graph.config.get(k)), None)
    if name is None or (s.pipeline == 1 and s.zero_stage < 3):
        return None
    return found(
        "SW3113",
        "parallelism.pipeline" if s.pipeline > 1 else "parallelism.zero_stage",
        (
            f"{name} {x.graph.config[name]} skips layers at random, which does not work in a "
            "pipeline or at zero_stage 3"
        ),
        f"Set {name} to 0 in model.config, or use pipeline: 1 with a zero_stage below 3.",
    )


def half_precision_accumulation(x: Candidate) -> Diagnostic | None:
    """bf16 has eight bits of precision. A sum in bf16 over many micro-batches rounds small
    gradients away."""
    training = x.recipe.training
    if not sums_are_rounded(training):
        return None
    if x.strategy.gradient_accumulation_steps == 1:
        return None
    return found(
        "SW3121",
        "training.gradient_accumulation_dtype",
        (
            f"gradients of {x.strategy.gradient_accumulation_steps} micro-batches are summed in "
            f"{training.gradient_accumulation_dtype}"
        ),
        "Write `gradient_accumulation_dtype: fp32`, which takes two more bytes a parameter.",
        severity="warning",
    )


def axes_are_runnable(x: Candidate) -> Diagnostic | None:
    """Each engine supports only some keys of the layout. A key that the cost model does not cover
    is rejected under every engine, without an estimate of time and memory."""
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
    priced = "" if all(axis.has_cost_model for axis in wrong) else ", and has no cost model"
    return found(
        "SW3115",
        f"parallelism.{next(iter(wrong)).name}",
        f"{named} cannot run under target: {x.recipe.target}{priced}",
        f"Use {' and '.join(plain)}{f', or `target: {able}`' * bool(able)}.",
    )


def moe_without_expert_parallelism(x: Candidate) -> Diagnostic | None:
    """Without expert parallelism every data-parallel rank holds all experts of its layers, or
    gathers them with ZeRO-3. Either `parallelism.expert` is 1, or the engine has no expert
    parallelism."""
    experts = experts_per_layer(x.graph)
    if experts < 2 or x.strategy.expert > 1:
        return None
    has = "expert" in ENGINES[x.recipe.target].axes
    able = " or ".join(f"`target: {e.name}`" for e in ENGINES.values() if "expert" in e.axes)
    lacks = "" if has else f", which target: {x.recipe.target} does not support"
    return found(
        "SW3132",
        "parallelism.expert",
        f"{experts} experts a layer without expert parallelism{lacks}",
        f"{'Write' if has else f'Write {able} and'} `expert: N` to shard the experts over N ranks, "
        "which may take much less time and memory. The estimate is for data-parallel ranks that "
        "each hold all experts of their layers, or gather them with ZeRO-3.",
        severity="warning",
    )


def learned_positions_cover_sequence(x: Candidate) -> Diagnostic | None:
    """A model with learned position embeddings has one vector for each position of its table, and
    none for later positions."""
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
    """Rotary embeddings can be computed for positions beyond those that the model was trained for,
    at some loss of quality."""
    length, most = x.recipe.training.sequence_length, x.graph.max_positions
    if most is None or length <= most or _has_position_table(x.graph):
        return None
    return found(
        "SW3117",
        "training.sequence_length",
        f"sequence_length {length} is longer than the model's max_position_embeddings {most}",
        (
            f"The model runs, but is not made for later positions. Use sequence_length <= {most}, "
            "or set the model's RoPE scaling in model.config for longer sequences."
        ),
        (most,),
        severity="warning",
    )


def _has_position_table(graph: ModelGraph) -> bool:
    """Return whether the embedding layer has a table of positions beside the tokens' table."""
    return any(p.shape[0] == graph.max_positions for p in graph.layers[0].parameters[1:])


def precision_has_peak(x: Candidate) -> Diagnostic | None:
    """The estimate of a step's time needs the GPU's peak TFLOP/s in training.precision. The GPU
    catalogue lists the precisions that a GPU computes in; an inline GPU has its peak_tflops."""
    return missing_peak_error(x.recipe.training.precision, x.cluster)


def fp16_on_cpu(x: Candidate) -> Diagnostic | None:
    """Measured: DeepSpeed's CPU accelerator refuses fp16 at start."""
    return fp16_on_cpu_error(x.recipe.training.precision, x.cluster)


def zero_3_over_slow_links(x: Candidate) -> Diagnostic | None:
    """ZeRO stage 3 sends all parameters over the links three times a micro-batch (DeepSpeed#6889,
    #7019, #2928). The warning is for less than 200 Gb/s per GPU between nodes."""
    s, rate = x.strategy, x.cluster.inter_node_bytes_per_second
    if s.zero_stage < 3 or x.cluster.nvlink_domains == 1 or rate >= SLOW_LINK_BYTES_PER_SECOND:
        return None
    return found(
        "SW3120",
        "parallelism.zero_stage",
        f"zero_stage 3 over links of {rate * 8 / 1e9:.0f} Gb/s per GPU: a step may take longer on "
        "more nodes",
        "Use a pipeline with zero_stage: 1, which sends far less between nodes.",
        severity="warning",
    )


def model_is_causal(x: Candidate) -> Diagnostic | None:
    """In a tiny copy of the model, changing a later token changes earlier logits, so next-token
    prediction can read its answers. A plain Hugging Face run trains the model the same way, so this
    is only a warning."""
    if x.graph.cut.causal:
        return None
    return found(
        "SW3130",
        "model",
        (
            f"{x.graph.model_type!r} attends to later tokens with this configuration, so its loss "
            "does not measure next-token prediction"
        ),
        "If the type has the key is_decoder, set `is_decoder: true` in model.config.",
        severity="warning",
    )


def modules_are_recomputed(x: Candidate) -> Diagnostic | None:
    """Only `target: megatron` recomputes single modules of a layer. Other engines recompute layers
    or attention as a whole."""
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
    """Megatron-Core recomputes a module only if the model has the module and the installed version
    accepts its name. `moe_act` also needs Transformer Engine's layers."""
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
        f"Leave the named module{'s' if len(reasons) > 1 else ''} out: write "
        f"`activation_checkpointing: {value_text(rest) if rest else 'none'}`. Or write `full`.",
    )


def hf_loss_is_next_token(x: Candidate) -> Diagnostic | None:
    """Training uses next-token cross-entropy on the logits. In a tiny copy of the model, Hugging
    Face's own loss has another value, for example because of label smoothing, codebooks, image
    tokens or an auxiliary loss of the routers."""
    if x.graph.cut.loss != "other":
        return None
    return found(
        "SW3131",
        "model",
        "training uses next-token cross-entropy, but Hugging Face computes another loss for "
        f"{x.graph.model_type!r}",
        "Do not compare the losses with those of a Hugging Face run of this model type.",
        severity="warning",
    )


# The layout rules about states in host memory.


def offload_fits_host_memory(x: Candidate) -> Diagnostic | None:
    """Offloaded states are kept in each node's memory, which cluster.host_memory_gib gives. A node
    that runs out of memory kills its ranks with signal 9 and no message."""
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
            "Set cluster.host_memory_gib: the compiler then checks that the offloaded states fit.",
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
