"""What large collectives reach between nodes, by the fabric's measured curve."""

from __future__ import annotations

import pytest

from shardwright.cost.collective_bandwidth import Collective, bandwidth_share, fabrics
from shardwright.recipe.literal_types import Fabric

EFA = fabrics()["efa"]
SIZE = EFA["adapter_bytes"]


def efa_share(collective: Collective, ranks: int, nodes: int, adapter_bytes: float = SIZE) -> float:
    """Return EFA's."""
    found = bandwidth_share("efa", collective, ranks, nodes, adapter_bytes)
    assert found is not None
    return found


@pytest.mark.parametrize("fabric", sorted(fabrics()))
def test_full_nodes_reach_what_was_measured(fabric: Fabric) -> None:
    curve = fabrics()[fabric]
    for ranks, share in zip(curve["ranks"], curve["all_gather"], strict=True):
        found = bandwidth_share(fabric, "all_gather", ranks, ranks // 8, curve["adapter_bytes"])
        assert found == pytest.approx(share)


def test_ranks_that_are_spread_over_more_nodes_reach_less() -> None:
    shares = [efa_share("all_reduce", 32, nodes) for nodes in (4, 8, 16, 32)]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    # And more than as many full nodes, whose ring is longer.
    assert shares[-1] > efa_share("all_reduce", 256, 32)


def test_larger_messages_reach_more_up_to_the_whole_link() -> None:
    shares = [efa_share("all_gather", 64, 8, SIZE * factor) for factor in (1 / 32, 1, 32, 1e6)]
    assert shares[1] == pytest.approx(0.1725)
    assert shares[0] == pytest.approx(shares[1] / 2) and shares[2] == pytest.approx(2 * shares[1])
    assert shares[3] == pytest.approx(2 * shares[1]), "no more than twice of what was measured"
    assert efa_share("all_reduce", 16, 2, SIZE * 1e6) == 1.0


def test_a_fabric_without_a_curve_has_no_share() -> None:
    assert bandwidth_share("infiniband", "all_reduce", 64, 8, SIZE) is None
