"""The process in which `calibrate` measures."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed as dist

from shardwright.calibrate import calibration_process, layer_benchmarks
from shardwright.calibrate.measurement_job import EngineJob
from shardwright.engines import trainer_protocol
from shardwright.plan import plan


def test_another_process_that_takes_its_port_does_not_stop_the_engine_s_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []
    with contextlib.ExitStack() as opened:

        def open_groups(plan: object) -> None:
            opened.enter_context(socket.create_server(("", int(os.environ["MASTER_PORT"]))))
            dist.init_process_group("gloo")

        runtime = SimpleNamespace(
            prepare_process=lambda plan, **_: None,
            open_groups=open_groups,
            close_groups=dist.destroy_process_group,
        )
        monkeypatch.setattr(plan, "load_plan", lambda folder: None)
        monkeypatch.setattr(trainer_protocol, "engine_runtime", lambda plan: runtime)
        monkeypatch.setattr(layer_benchmarks, "measure_short_layers", lambda *_: None)
        monkeypatch.setattr(
            layer_benchmarks, "measure_engine", lambda *_: measured.append(dist.get_world_size())
        )
        job = EngineJob(zero_stage=1, folders=("copy",))
        bench: Any = SimpleNamespace(
            job=SimpleNamespace(engine=(job,)), attempt=lambda what, run: run()
        )
        calibration_process._engine(bench, 1.0)
    assert measured == [1]
