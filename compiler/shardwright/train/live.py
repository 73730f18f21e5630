"""What a rank really holds: read off the live parameters, for whoever compares it with plan.json."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from shardwright.engines.protocol import HeldParameter
from shardwright.ir.json_value import JsonValue


def live_record(held: Mapping[str, HeldParameter], rank: int) -> dict[str, JsonValue]:
    """parameter_bytes: resident parameters in the compute dtype (under ZeRO-3, this data rank's partitions).

    shapes: Hugging Face name -> the shape of this rank's part, before ZeRO's flattening.
    """
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "parameter_bytes": sum(p.resident_bytes for p in held.values()),
        "shapes": {name: list(p.shape) for name, p in held.items()},
    }
