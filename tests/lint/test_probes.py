"""Each rule holds for the installed DeepSpeed: it refuses the example of `explain`, or does another
thing than it says, and takes what is recommended instead. One process runs them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics.code_explanations import ds_config_explanations
from shardwright.diagnostics.code_registry import DS_CONFIG_CODES
from shardwright.lint.ds_config_key_rules import TRAINER_AUTO_KEYS
from shardwright.utils.child_processes import free_port
from tests.lint.probes import PROBES, Probe

GOOD = sorted((Path(__file__).parent / "good").glob("*.json"))

CASES = [
    (code, number, probe) for code, probes in PROBES.items() for number, probe in enumerate(probes)
]
LAST = {"checkpoint": 1, "groups": 2, "mesh": 3}
NOTHING_TO_PROBE = {
    "SW4009": "a limit of ours",
    "SW4010": "our own writing",
    "SW4011": "no file of DeepSpeed's, tests/lint/test_file_kind.py",
    "SW4012": "Accelerate's, tests/lint/test_file_kind.py",
    "SW4013": "Accelerate's, tests/lint/test_file_kind.py",
    "SW4101": "the lowering's, tests/unit/engines/test_autotp.py",
    "SW4206": "PyTorch Lightning's, which is not installed; tried with lightning 2.6.6",
    "SW4612": "of many models, tests/lint/test_named_model.py",
    "SW4801": "the cost model's, tests/calibration",
}


def test_every_rule_has_a_probe() -> None:
    assert PROBES.keys() | NOTHING_TO_PROBE.keys() == DS_CONFIG_CODES.keys()
    assert not PROBES.keys() & NOTHING_TO_PROBE.keys()


def every_auto() -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name in TRAINER_AUTO_KEYS:
        *sections, key = name.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = "auto"
    return document


def request(code: str, probe: Probe, which: str) -> dict[str, Any] | None:
    """What the worker is asked for; None where there is nothing to run."""
    at = probe.at if which == "example" or probe.instead_at is None else probe.instead_at
    if not at:
        return None
    given = getattr(probe, which)
    entry = ds_config_explanations()[code]
    text = getattr(entry, which) if given is None else given
    options = {"world_size": entry.world_size or None, **probe.options}
    if at in ("file", "trainer_file"):
        return {"at": at, "text": text, **options}
    return {"at": at, "config": json.loads(text) if isinstance(text, str) else text, **options}


def on_two_ranks(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    program, port = str(Path(__file__).with_name("ranks_worker.py")), str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, program, port, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    try:
        assert started[0].stdin is not None
        started[0].stdin.write(json.dumps(cases))
        started[0].stdin.close()
        out, errors = started[1].communicate(json.dumps(cases), timeout=200)
    finally:
        for process in started:
            process.kill()
    assert started[1].returncode == 0, errors[-4000:]
    outcomes: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return outcomes


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, int, str], dict[str, Any]]:
    pytest.importorskip("deepspeed")
    keys = [(code, number, which) for code, number, _ in CASES for which in ("example", "instead")]
    requests = {key: request(key[0], PROBES[key[0]][key[1]], key[2]) for key in keys}
    asked = {key: case for key, case in requests.items() if case is not None}
    for path in GOOD:
        trainer, text = path.stem.startswith("trainer-"), path.read_text(encoding="utf-8")
        case = (
            {"at": "filled", "config": json.loads(text)}
            if trainer
            else {"at": "file", "text": text}
        )
        asked[path.stem, 0, "good"] = case
    asked["every auto", 0, "good"] = {"at": "filled", "config": every_auto()}
    ranked = [key for key in asked if asked[key]["at"] == "ranks"]
    # What these leave behind in the process would change the others; the same order in every run.
    order = sorted(asked.keys() - set(ranked), key=lambda key: (LAST.get(asked[key]["at"], 0), key))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("probe_worker.py")), str(free_port())],
        input=json.dumps([asked[key] for key in order]),
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("probes"),
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = dict(zip(order, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return found | dict(zip(ranked, on_two_ranks([asked[key] for key in ranked]), strict=True))


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_known_good_file_is_good(
    path: Path, outcomes: dict[tuple[str, int, str], dict[str, Any]]
) -> None:
    found = outcomes[path.stem, 0, "good"]
    assert found["error"] == "" and found["facts"].get("left", []) == []


def test_what_the_trainer_fills_in(outcomes: dict[tuple[str, int, str], dict[str, Any]]) -> None:
    found = outcomes["every auto", 0, "good"]
    assert found["error"] == "" and found["facts"]["left"] == []


@pytest.mark.parametrize(
    ("code", "number", "probe"), CASES, ids=[f"{code}-{number}" for code, number, _ in CASES]
)
def test_rule_is_true(
    code: str, number: int, probe: Probe, outcomes: dict[tuple[str, int, str], dict[str, Any]]
) -> None:
    bad, good = (
        outcomes[code, number, "example"],
        outcomes.get((code, number, "instead"), {"error": "", "facts": {}}),
    )
    assert good["error"] == ""
    if probe.refuses:
        assert probe.refuses in bad["error"], bad
    else:
        assert bad["error"] == ""
        assert probe.fact is not None
        assert probe.fact(bad["facts"], good["facts"]), (bad["facts"], good["facts"])
    if probe.logged:
        assert any(probe.logged in line for line in bad["logs"]), bad["logs"]
        assert not any(probe.logged in line for line in good.get("logs", ())), good
