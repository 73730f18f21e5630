"""Convert the launcher's options to the recipe's cluster and launch sections."""

from __future__ import annotations

import contextlib
import os
import re

from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.migrate.launch_command import (
    OWN_SCRIPTS,
    hostfile_slots,
    parse_include_filter,
)
from shardwright.migrate.recipe_draft import (
    LONGEST_VALUE,
    ImportSources,
    as_count,
    as_text,
    is_secret,
)
from shardwright.utils.file_io import read_regular_text_file
from shardwright.utils.shell_script import resolved_text

_LAUNCHERS = ("pdsh", "slurm", "openmpi")
"""Lists the launchers that `deepspeed --launcher` shares with `launch.launcher`."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")
_OWN_PROGRAM = "shardwright run trains by a program of its own"
_UNUSED_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("node_rank", "machine_rank"), "each node knows its number"),
    **dict.fromkeys(("module", "m", "no_python", "no_local_rank"), _OWN_PROGRAM),
    "force_multi": "one node or more follows from cluster.nodes",
    "compute_environment": "launch.launcher says where it runs",
    "distributed_type": "target and parallelism say how it is trained",
    "main_training_function": _OWN_PROGRAM,
    "use_deepspeed": "a recipe's target is DeepSpeed by default",
    "zero3_init_flag": "weights are always loaded a stage at a time",
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_endpoint"), "the ranks meet by launch.master_addr and master_port"
    ),
    **dict.fromkeys(("deepspeed_config_file", "config_file"), "the file that was read"),
    "same_network": "launch.launcher says where it runs",
    "zero3_save_16bit_model": "checkpoints are whole in any layout; `shardwright export`",
    **dict.fromkeys(
        (
            *("fsdp_version", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap"),
            *("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch"),
            *("fsdp_use_orig_params", "fsdp_limit_all_gathers", "fsdp_min_num_params"),
        ),
        "compile shards by the layout",
    ),
    **dict.fromkeys(
        ("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"),
        "weights are always loaded a stage at a time",
    ),
    "fsdp_state_dict_type": "checkpoints are whole in any layout; `shardwright export`",
    **dict.fromkeys(
        (
            *("parallelism_config_sp_backend", "parallelism_config_sp_seq_length"),
            *(
                "parallelism_config_sp_seq_length_is_variable",
                "parallelism_config_sp_attn_implementation",
            ),
            "parallelism_config_cp_comm_strategy",
        ),
        "parallelism.context says how many ranks share a sequence",
    ),
    "accelerate_config": "the file that was read",
    "config": "the file that was read",
    "debug": "PyTorch's own setting; not part of a recipe",
    "downcast_bf16": "it is for TPUs",
    "enable_cpu_affinity": "a recipe has no such key",
    "rdzv_id": "the ranks meet by launch.master_addr and master_port",
    **dict.fromkeys(
        ("use_cpu", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "dynamo_backend"),
        "a recipe has no such key",
    ),
    "standalone": "each start has an address of its own",
    "multi_gpu": "several GPUs follow from cluster",
    "use_fsdp": "parallelism.zero_stage says what is sharded",
}
_HOSTFILE = ("hostfile", "deepspeed_hostfile")
_NO_SUCH_OPTION = "an option of the launcher that a recipe does not have"
_BY_THE_SHELL = "its value is the shell's: name it in launch.env_from"
_OWN_VARIABLES = (
    *("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "FORCE_TORCHRUN"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK"),
)


def cluster(s: ImportSources, folder: str) -> None:
    """Convert the cluster.

    folder: absolute, of the recipe; relative paths start there
    """
    hosts: dict[str, int] = {}
    hostfile = s.option(*_HOSTFILE)
    if hostfile is not None:
        with contextlib.suppress(OSError, ValueError):
            hosts = dict(hostfile_slots(read_regular_text_file(hostfile[1])))
    filtered = s.option("include")
    if filtered is not None:
        chosen = parse_include_filter(filtered[1])
        counts = {
            len(numbers) if numbers is not None else hosts.get(host)
            for host, numbers in chosen.items()
        }
        s.nodes = len(chosen) or None
        s.gpus_per_node = counts.pop() if len(counts) == 1 else None
        s.draft.take("--include", "cluster")
    elif hosts:
        exclude = s.option("exclude")
        excluded = parse_include_filter(exclude[1] if exclude is not None else "")
        kept = {
            h: n - len(excluded.get(h) or ())
            for h, n in hosts.items()
            if excluded.get(h, ()) is not None
        }
        sizes = set(kept.values())
        s.nodes, s.gpus_per_node = len(kept), sizes.pop() if len(sizes) == 1 else None
        s.draft.take("--exclude", "cluster")
    _size_of_counts(s)
    visible = s.command.environment.get("CUDA_VISIBLE_DEVICES", "")
    if s.gpus_per_node is None and re.fullmatch(r"\d+(,\d+)*", visible) and sees_devices(s):
        s.gpus_per_node, s.nodes = len(visible.split(",")), s.nodes or 1
        if visible == ",".join(map(str, range(s.gpus_per_node))):  # others stay in launch.env
            s.draft.take("CUDA_VISIBLE_DEVICES", "cluster")
    if s.command.launcher == "python" and s.gpus_per_node is None:
        s.gpus_per_node = 1
    ranks = s.checkpoint.get("world_size")
    if ranks is not None and isinstance(ranks[0], int):
        s.world_size = ranks[0]
    if s.nodes and s.gpus_per_node:
        s.world_size = s.nodes * s.gpus_per_node
    for key, count, what in (
        ("nodes", s.nodes, "the number of machines"),
        ("gpus_per_node", s.gpus_per_node, "GPUs of each machine"),
    ):
        if f"cluster.{key}" in s.draft.fill:
            continue
        if count is None:
            total = "" if s.world_size is None else f"; nodes x gpus_per_node is {s.world_size}"
            s.draft.ask(f"cluster.{key}", f"{what}{total}")
        else:
            s.draft.put(f"cluster.{key}", count)
    cpu = s.word(lambda value: value is True or value == "true" or None, "use_cpu", "cpu")
    if cpu is not None:
        s.draft.put("cluster.gpu", "cpu", cpu[0])
    else:
        s.draft.ask(
            "cluster.gpu",
            "the GPU: a name of the catalogue, such as h100-sxm-80gb or a100-sxm4-80gb",
        )
    if hostfile is not None:
        if os.path.isfile(hostfile[1]):
            s.draft.put("launch.hostfile", os.path.relpath(hostfile[1], folder), hostfile[0])
        else:
            why = "it is not on this machine; give it to `shardwright run --hostfile`"
            s.draft.leave("launch", hostfile[0], hostfile[1], why)
    address = s.word(as_text, "master_addr", "main_process_ip")
    if address is not None and _HOST.fullmatch(address[1]):
        s.draft.put("launch.master_addr", address[1], address[0])
    port = s.word(as_count, "master_port", "main_process_port")
    if port is not None and port[1] <= 65535:
        s.draft.put("launch.master_port", port[1], port[0])
    launcher = s.word(as_text, "launcher")
    if launcher is not None and launcher[1].lower() in _LAUNCHERS:
        s.draft.put("launch.launcher", launcher[1].lower(), launcher[0])
    elif launcher is not None:
        several = ", ".join(name for name, row in LAUNCHERS.items() if row.is_multi_node)
        why = f"this launcher is none of a recipe's: {several}"
        s.draft.leave("launch", launcher[0], launcher[1], why)
    if "no_ssh" in s.options:
        s.draft.put("launch.launcher", "no_ssh", "--no_ssh")
    _environment(s)


def sees_devices(s: ImportSources) -> bool:
    """Return whether the launcher starts a rank on each device of CUDA_VISIBLE_DEVICES."""
    return s.command.launcher in ("deepspeed", "python", *OWN_SCRIPTS)


def _environment(s: ImportSources) -> None:
    values = {k: v for k, v in s.command.environment.items() if k not in s.draft.carried}
    own = [name for name in _OWN_VARIABLES if name in values]
    for name in own:
        s.draft.leave("launch", name, values.pop(name), "the launcher sets it")
    secret = sorted(name for name in values if is_secret(name))
    plain = {
        name: value
        for name, value in sorted(values.items())
        if name not in secret and value.isprintable() and resolved_text(value) == value
    }
    if plain:
        s.draft.put("launch.env", dict(plain), "the command", *plain)
    if secret:
        s.draft.put(
            "launch.env_from", list(secret), "the command; a recipe holds no secret values", *secret
        )
    for name, value in values.items():
        why = "a value with control characters" if not value.isprintable() else _BY_THE_SHELL
        s.draft.leave("launch", name, value, why)


def rest(s: ImportSources) -> None:
    """Comment on the options that nothing has read."""
    for name, why in _UNUSED_OPTIONS.items():
        if name in s.options:
            s.draft.leave("launch", s.options[name].written, s.options[name].text, why)
    for option in s.options.values():
        if option.written not in s.draft.carried:
            is_known = resolved_text(option.text) is not None
            why = _NO_SUCH_OPTION if is_known else "only the shell knows its value"
            s.draft.leave("launch", option.written, option.text, why)
    for words in s.command.before:
        s.draft.note("launch", f"not carried, words before the launcher: {words[:LONGEST_VALUE]}")


def _size_of_counts(s: ImportSources) -> None:
    """Read the counts of nodes and GPUs; one that is there and cannot be read is asked for."""
    s_nodes = _count(s, "cluster.nodes", "num_nodes", "nnodes", "num_machines", variable="NNODES")
    gpus = _count(
        s,
        "cluster.gpus_per_node",
        *("num_gpus", "num_accelerators", "nproc_per_node"),
        variable="NPROC_PER_NODE",
    )
    total = _count(s, "cluster.gpus_per_node", "num_processes")
    s.nodes = s_nodes if s_nodes is not None else s.nodes
    s.gpus_per_node = gpus if gpus is not None else s.gpus_per_node
    if (
        s.nodes is None
        and "cluster.nodes" not in s.draft.fill
        and (gpus is not None or total is not None or s.command.launcher == "python")
    ):
        s.nodes = 1
    if total is not None:
        s.world_size = total
        if s.gpus_per_node is None and s.nodes and total % s.nodes == 0:
            s.gpus_per_node = total // s.nodes


def _count(s: ImportSources, key: str, *names: str, variable: str = "") -> int | None:
    found = s.word(as_count, *names)
    if found is not None:
        s.draft.take(found[0], "cluster")
        return found[1]
    if any(name in s.options for name in names):
        s.ask_unread(key, *names)
        return None
    if variable and s.command.launcher in OWN_SCRIPTS and variable in s.command.environment:
        value = s.command.environment[variable]
        s.draft.take(variable, "cluster")
        count = as_count(resolved_text(value))
        if count is None:
            s.draft.ask(key, f"the command has {variable}={value}")
        return count
    return None
