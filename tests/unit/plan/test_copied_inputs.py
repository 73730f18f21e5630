"""The hostfile that travels with the folder."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Refusal
from shardwright.plan.hostfile import read_hostfile


def test_hosts_in_order_without_comments() -> None:
    hosts = read_hostfile(
        "hosts", "# rack 1\nb slots=8\n\n  a.local   slots=8  \n", nodes=2, gpus_per_node=8
    )
    assert [(host.name, host.place.line) for host in hosts] == [("b", 2), ("a.local", 4)]


@pytest.mark.parametrize(
    "line",
    ["b slots=8 # eight", "b slots=8 max_slots=8", "b  slots=8  max-slots=16  # rack 2, 8 of 16"],
)
def test_what_deepspeed_and_open_mpi_allow_behind_the_slots(line: str) -> None:
    first, second = read_hostfile("hosts", f"a slots=8\n{line}\n", nodes=2, gpus_per_node=8)
    assert (second.name, second.slots) == ("b", 8) and first.slots == 8


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("b", "SW5201"),
        ("b slots=", "SW5201"),
        ("b slots=-1", "SW5201"),
        ("b slots=8 eight", "SW5201"),
        ("b slots=8#eight", "SW5201"),
        ("b max_slots=8 slots=8", "SW5201"),
        ("b;reboot slots=8", "SW5201"),
        ("$(reboot) slots=8", "SW5201"),
        ("-oProxyCommand=reboot slots=8", "SW5201"),
        ("b slots=٨", "SW5201"),
        ("fe80::1 slots=8", "SW5201"),
        ("b,c slots=8", "SW5201"),
        ("me@-oProxyCommand=reboot slots=8", "SW5201"),
        ("a slots=8", "SW5202"),
        ("b slots=4", "SW5203"),
    ],
)
def test_bad_line_is_named_with_its_number(line: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_hostfile("hosts", f"a slots=8\n\n{line}\n", nodes=2, gpus_per_node=8)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.location is not None and diagnostic.location.line == 3


def test_every_bad_line_at_once() -> None:
    with pytest.raises(Refusal) as caught:
        read_hostfile("hosts", "a\nb slots=1\nb slots=1\nc slots=2\n", nodes=2, gpus_per_node=1)
    assert [d.code for d in caught.value.diagnostics] == ["SW5201", "SW5202", "SW5203"]


@pytest.mark.parametrize(("nodes", "line"), [(1, 2), (3, 0)])
def test_as_many_hosts_as_nodes(nodes: int, line: int) -> None:
    with pytest.raises(Refusal) as caught:
        read_hostfile("hosts", "a slots=8\nb slots=8\n", nodes=nodes, gpus_per_node=8)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SW5203" and "2 hosts" in diagnostic.message
    assert diagnostic.location is not None and diagnostic.location.line == line


def test_a_port_belongs_in_the_configuration_of_ssh() -> None:
    """pdsh would read `gpu-2:2222` as a way to log in called gpu-2."""
    with pytest.raises(Refusal) as caught:
        read_hostfile("hosts", "gpu-1 slots=8\nme@gpu-2:2222 slots=8\n", nodes=2, gpus_per_node=8)
    (diagnostic,) = caught.value.diagnostics
    assert (
        diagnostic.code == "SW5201"
        and diagnostic.location is not None
        and diagnostic.location.line == 2
    )
    assert "'me@gpu-2:2222'" in diagnostic.message
    assert "~/.ssh/config: `Host gpu-2` and below it `Port 2222`" in diagnostic.help
    (host,) = read_hostfile("hosts", "me@gpu-2.local slots=8\n", nodes=1, gpus_per_node=8)
    assert host.name == "me@gpu-2.local"


@pytest.mark.parametrize(
    ("slots", "offered"),
    [
        (
            [8] * 4 + [4] * 8,
            "nodes: 12, gpus_per_node: 4 (48 GPUs) or nodes: 4, gpus_per_node: 8 (32 GPUs).",
        ),
        (
            [8] * 8 + [4] * 4,
            "nodes: 8, gpus_per_node: 8 (64 GPUs) or nodes: 12, gpus_per_node: 4 (48 GPUs).",
        ),
        ([4] * 12, "cluster.nodes: 12, gpus_per_node: 4 (48 GPUs)."),
        ([0, 4], "cluster.nodes: 1, gpus_per_node: 4 (4 GPUs)."),
    ],
)
def test_hosts_of_other_sizes_are_offered_as_the_clusters_that_they_make(
    slots: list[int], offered: str
) -> None:
    text = "".join(f"gpu-{index} slots={count}\n" for index, count in enumerate(slots))
    with pytest.raises(Refusal) as caught:
        read_hostfile("hosts", text, nodes=12, gpus_per_node=16)
    assert all(d.code == "SW5203" and offered in d.help for d in caught.value.diagnostics)
