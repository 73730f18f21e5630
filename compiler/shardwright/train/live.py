"""What a rank really holds: read off the live parameters, for whoever compares it with plan.json."""

from __future__ import annotations

import os
import socket

from torch import nn

from shardwright.ir.json_value import JsonValue
from shardwright.modules.lora import plain_name


def live_record(module: nn.Module, rank: int) -> dict[str, JsonValue]:
    """parameter_bytes: resident parameters in the compute dtype (under ZeRO-3, this data rank's partitions).

    shapes: Hugging Face name -> the shape of this rank's part, before ZeRO's flattening.
    """
    total, shapes = 0, {}
    for name, p in module.named_parameters():
        # ds_tensor is ZeRO-3's own partition of the parameter, ds_shape the shape that it cuts.
        resident = getattr(p, "ds_tensor", p)
        total += resident.numel() * p.element_size()
        shapes[plain_name(name)] = list(getattr(p, "ds_shape", p.shape))
    return {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "parameter_bytes": total, "shapes": shapes}
