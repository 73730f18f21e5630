"""Where the fp32 master and the moments of a model's parameter are, under each of Megatron's
optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStates:
    """Of one parameter, flattened: elements from `start` that this rank updates. states: 1-D views
    by AdamW's names."""

    start: int
    states: dict[str, torch.Tensor]
    partitioned: bool

    @property
    def numel(self) -> int:
        return self.states["fp32"].numel()


def _steps_per_group(part: Any) -> bool:
    """Updates: where Transformer Engine or Apex is installed, Megatron takes its FusedAdam
    (megatron/core/optimizer/__init__.py), whose groups have the number once the first is made."""
    return not isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


class MegatronOptimizerStates:
    """The optimizers behind Megatron's own: one, or one for experts beside it."""

    def __init__(self, optimizer: Any) -> None:
        self.parts: list[Any] = list(getattr(optimizer, "chained_optimizers", [optimizer]))

    def of(self, parameter: nn.Parameter) -> ParameterStates | None:
        """None: other data ranks update all of it."""
        for part in self.parts:
            if isinstance(part, DistributedOptimizer):
                if parameter in part.model_param_group_index_map:
                    group, place = part.model_param_group_index_map[parameter]
                    master = part.optimizer.param_groups[group]["params"][place]
                    return self._master(
                        part,
                        master,
                        part._get_model_param_range_map(parameter)["param"].start,
                        True,
                    )
            elif isinstance(part, Float16OptimizerWithFloat16Params):
                if any(parameter is p for group in part.float16_groups for p in group):
                    half: Any = parameter
                    return self._master(part, half.main_param, 0, False)
            elif any(parameter is p for group in part.param_groups for p in group["params"]):
                return self._master(part, parameter, 0, False)
        return None

    def _master(
        self, part: Any, master: torch.Tensor, start: int, partitioned: bool
    ) -> ParameterStates:
        state = self._state(part, master)
        flats = {"fp32": master.detach(), **{moment: state[moment] for moment in MOMENTS}}
        states = {name: values.view(-1) for name, values in flats.items()}
        return ParameterStates(start=start, states=states, partitioned=partitioned)

    def _state(self, part: Any, master: torch.Tensor) -> dict[str, Any]:
        """AdamW makes it in its first update; what saves or restores needs it earlier."""
        state: dict[str, Any] = part.optimizer.state[master]
        if not state and not _steps_per_group(part):
            state["step"] = torch.tensor(0.0)
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        return state

    def groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def updates(self) -> int:
        """Those made so far."""
        return max(
            (self._steps(part, p) for part in self.parts for p in self._masters(part)), default=0
        )

    @updates.setter
    def updates(self, count: int) -> None:
        for part in self.parts:
            for group in part.optimizer.param_groups:
                if _steps_per_group(part):
                    group["step"] = count
            for master in self._masters(part):
                state = self._state(part, master)
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].fill_(count)

    def _masters(self, part: Any) -> list[torch.Tensor]:
        return [p for group in part.optimizer.param_groups for p in group["params"]]

    def _steps(self, part: Any, master: torch.Tensor) -> int:
        if _steps_per_group(part):
            return max(int(group.get("step", 0)) for group in part.optimizer.param_groups)
        return int(self._state(part, master)["step"])

    def copy_masters_to_model(self, chunks: list[Any]) -> None:
        """Collective. The weights that the model computes with, from the masters that were
        restored."""
        for part in self.parts:
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if any(isinstance(part, DistributedOptimizer) for part in self.parts):
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)
