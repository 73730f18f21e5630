"""List the optimizers of `training.optimizer.name`, one row each, with their states and traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.layout.formats import FORMATS, MASTER_BYTES, element_bytes
from shardwright.layout.quantized_moments import BLOCK
from shardwright.recipe.literal_types import Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Describes what an optimizer stores and moves, per trained parameter.

    moments: state tensors beside the master copy, by the names that checkpoints give them.
    orthogonalizes: matrices of the decoder layers have other moments (layout/muon_matrices.py).
    factors: parameters of two or more dimensions have others, one element a row and a column.
    quantizes: large parameters have moments of a byte an element, with an fp32 scale a block
        (layout/quantized_moments.py).
    matrix_moments: those other moments that are like the parameter.
    moment_bytes: bytes of an element of each. traffic: GPU memory traffic of an update over
    AdamW's, which calibration measures. Each engine lists those it supports
    (engines/engine_table.py).
    """

    moments: tuple[str, ...]
    moment_bytes: int
    traffic: float
    orthogonalizes: bool = False
    factors: bool = False
    quantizes: bool = False
    matrix_moments: tuple[str, ...] = ()

    @property
    def moments_bytes(self) -> int:
        """Return the bytes of all moments."""
        return len(self.moments) * self.moment_bytes

    @property
    def matrix_saving_bytes(self) -> float:
        """Return by how many bytes a matrix's moments are smaller than `moments_bytes`."""
        if self.quantizes:
            return self.moments_bytes - len(self.moments) * (1 + MASTER_BYTES / BLOCK)
        differs = self.orthogonalizes or self.factors
        spared = len(self.moments) - len(self.matrix_moments) if differs else 0
        return spared * self.moment_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a checkpoint's master copy and moments."""
        return MASTER_BYTES + self.moments_bytes

    @property
    def host_traffic_bytes(self) -> int:
        """Return the bytes that an update moves in host memory.

        States are read and written, an fp32 gradient is read, half-precision weights are written.
        """
        return 2 * self.state_bytes + MASTER_BYTES + element_bytes("bf16")

    def held_bytes(self, precision: str, zero_stage: int) -> int:
        """Return the bytes on a rank before sharding; ZeRO keeps a master copy of fp32 weights
        too."""
        has_master = FORMATS[precision].is_half or zero_stage > 0
        return self.moments_bytes + (MASTER_BYTES if has_master else 0)

    def offloaded_bytes(self, offload: Offload) -> int:
        """Bytes in host memory (arXiv 2101.06840): states and an fp32 gradient; with parameters,
        the weights in half precision too."""
        states = self.state_bytes + MASTER_BYTES
        return {
            "none": 0,
            "optimizer": states,
            "parameters": states + element_bytes("bf16"),
        }[offload]


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(
        moments=("exp_avg", "exp_avg_sq"),
        moment_bytes=4,
        traffic=1.0,
    ),
    "muon": Optimizer(
        moments=("exp_avg", "exp_avg_sq"),
        orthogonalizes=True,
        matrix_moments=("momentum_buffer",),
        moment_bytes=4,
        traffic=1.0,
    ),
    "lion": Optimizer(
        moments=("exp_avg",),
        moment_bytes=4,
        traffic=22 / 30,  # one moment is read and written, not two: host_traffic_bytes
    ),
    "adamw_8bit": Optimizer(
        moments=("exp_avg", "exp_avg_sq"),
        quantizes=True,
        moment_bytes=4,
        # Codes are read, scaled, blended, measured, divided and rounded in passes of their own:
        # some 190 bytes an element, of 80 for the passes of torch's AdamW.
        traffic=2.4,
    ),
    "adafactor": Optimizer(
        moments=("variance",),
        factors=True,
        moment_bytes=4,
        # A matrix has no moment to read or write; its gradient is read three times and written
        # once, its weight is read twice: the sums of squares come before the update.
        traffic=34 / 30,
    ),
}
