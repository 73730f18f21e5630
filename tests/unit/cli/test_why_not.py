"""`--why-not` has an answer to every question, and never one that `estimate` contradicts."""

from __future__ import annotations

import functools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import command_options
from shardwright.cli.main import main
from tests.unit.cli.shipped_models import write_llama

MODELS = (
    *(
        "meta-llama/Llama-3.2-1B",
        "openai-community/gpt2-medium",
        "Qwen/Qwen3-0.6B",
        "google/gemma-2-2b",
    ),
    *(
        "bigscience/bloom-1b1",
        "mistralai/Mixtral-8x7B-v0.1",
        "EleutherAI/pythia-1.4b",
        "facebook/opt-6.7b",
    ),
)
# Values that fit, and values that do not.
VALUES: dict[str, tuple[int | str, ...]] = {
    "tensor": (1, 2, 3, 4, 5, 8, 16),
    "pipeline": (1, 2, 3, 4, 8, 16, 40),
    "data": (1, 2, 3, 4, 8, 16),
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 3, 4, 7, 16),
    "activation_checkpointing": ("none", "selective", "full"),
    "schedule": ("1f1b", "dualpipev"),
    "offload": ("none", "optimizer", "parameters"),
}
QUESTIONS = 5  # of each recipe: its plan is searched once
Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command's JSON. A recipe's own plan is remembered: `--why-not` would search it for each
    question."""
    read = command_options.read_priced_recipe
    known = functools.cache(lambda name: read(name))
    monkeypatch.setattr(command_options, "read_priced_recipe", lambda name, overrides: known(name))

    def call(*words: str) -> Any:
        capsys.readouterr()
        main([*words, "--json"])
        return json.loads(capsys.readouterr().out)

    return call


def recipe(draw: random.Random, folder: Path, number: int) -> str:
    """One that pins this and that."""
    pins = {
        key: draw.choice(VALUES[key])
        for key in draw.sample(list(VALUES), draw.choice((0, 0, 0, 1, 2)))
    }
    gpus = draw.choice((4, 8))
    return write_llama(
        folder,
        f"{number}.yaml",
        model={"source": draw.choice(MODELS), "weights": "random"},
        cluster={
            "nodes": draw.choice((1, 1, 2)),
            "gpus_per_node": gpus,
            "gpu": draw.choice(
                ("a100-sxm4-80gb", "a100-sxm4-40gb", "rtx4090-24gb", "h100-sxm-80gb")
            ),
            **draw.choice(({}, {"host_memory_gib": 1000})),
        },
        training={
            "sequence_length": draw.choice((512, 2048)),
            "global_batch_size": draw.choice((16, 48)),
            "steps": 10,
        },
        data={"kind": "synthetic"},
        parallelism=pins,
    )


def question(draw: random.Random) -> dict[str, int | str]:
    """One to five keys to ask about."""
    return {key: draw.choice(VALUES[key]) for key in draw.sample(list(VALUES), draw.randint(1, 5))}


def check_answers(count: int, seed: int, folder: Path, run: Run) -> Counter[str]:
    """Asks so many, QUESTIONS of each recipe; one whose own pins do not multiply out has no plan to
    ask about."""
    draw = random.Random(seed)
    verdicts: Counter[str] = Counter()
    number = 0
    while verdicts.total() < count:
        path, number = recipe(draw, folder, number), number + 1
        plan = run("estimate", path)
        if "memory" not in plan:
            continue
        for asked in (question(draw) for _ in range(QUESTIONS)):
            answer = run(
                "explain",
                path,
                "--why-not",
                ",".join(f"{key}={value}" for key, value in asked.items()),
            )
            consistent(path, asked, plan, answer, run)
            verdicts[answer["verdict"]] += 1
    return verdicts


def consistent(path: str, asked: dict[str, int | str], plan: Any, answer: Any, run: Run) -> None:
    codes = [d["code"] for d in answer["diagnostics"] if d["severity"] == "error"]
    estimate = answer["estimate"]
    assert codes or estimate is not None, "neither a code nor figures"
    assert answer["because"] or answer["verdict"] == "chosen"
    assert all(
        answer["plan"][key] == plan[key] for key in ("strategy", "memory", "time", "diagnostics")
    )
    # The same question to `estimate`.
    sets = [f"parallelism.{key}=auto" for key in answer["ignored_pins"]]
    sets += [f"parallelism.{key}={value}" for key, value in asked.items()]
    told = run("estimate", path, *(word for one in sets for word in ("--set", one)))
    assert [d["code"] for d in told["diagnostics"] if d["severity"] == "error"] == codes
    if estimate is None:
        assert "memory" not in told and answer["verdict"] == "forbidden"
        return
    for key in ("strategy", "memory", "time", "training", "feasible", "diagnostics"):
        assert told[key] == estimate[key], key
    assert all(estimate["strategy"][key] == value for key, value in asked.items())
    # And of exactly the layout that the answer names.
    whole = {key: estimate["strategy"][key] for key in (*VALUES, "expert", "context")}
    same = run(
        "estimate", path, *(w for k, v in whole.items() for w in ("--set", f"parallelism.{k}={v}"))
    )
    assert (same["feasible"], same["memory"], same["time"]) == (
        told["feasible"],
        told["memory"],
        told["time"],
    )
    step, slower = estimate["time"]["step_seconds"], answer["difference"]["slower"]
    assert slower == pytest.approx(step / plan["time"]["step_seconds"] - 1)
    match answer["verdict"]:
        case "forbidden":
            assert not estimate["feasible"] and set(codes) != {"SW3201"}
        case "does not fit":
            assert set(codes) == {"SW3201"} and not estimate["memory"]["fits"]
        case "chosen":
            assert estimate["strategy"] == plan["strategy"] and not codes
        case "wins":
            assert estimate["feasible"] and (
                answer["ignored_pins"] or not plan["feasible"] or pins_differ(path, asked)
            )
        case "loses":
            assert estimate["feasible"] and plan["feasible"]


def pins_differ(path: str, asked: dict[str, int | str]) -> bool:
    """Only what the recipe forbids itself can be better than what it chose (it never offloads
    unasked)."""
    pins = json.loads(Path(path).read_text())["parallelism"]
    return any(
        pins.get(key, "none" if key == "offload" else value) != value
        for key, value in asked.items()
    )


def test_eight_random_layouts(tmp_path: Path, run: Run) -> None:
    verdicts = check_answers(8, 20261121, tmp_path, run)
    assert {"forbidden", "loses"} <= set(verdicts), verdicts


def test_what_does_not_fit_says_by_how_much(tmp_path: Path, run: Run) -> None:
    path = write_llama(tmp_path, cluster={"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-40gb"})
    asked: dict[str, int | str] = {"pipeline": 1, "zero_stage": 1, "tensor": 1}
    answer = run("explain", path, "--why-not", "pipeline=1,zero_stage=1,tensor=1")
    assert answer["verdict"] == "does not fit" and "of 40.0 GiB" in answer["answer"]
    consistent(path, asked, run("estimate", path), answer, run)


@pytest.mark.prove
def test_a_thousand_random_layouts(tmp_path: Path, run: Run, proved: Callable[..., None]) -> None:
    verdicts = check_answers(1000, 1, tmp_path, run)
    proved(
        "why-not",
        "random layouts",
        {"asked": verdicts.total(), "contradicted": 0, "verdicts": dict(verdicts)},
    )


def test_the_page_names_rule_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama(tmp_path)
    assert main(["explain", path, "--why-not", "pipeline=2,zero_stage=3"]) == 0
    out = capsys.readouterr().out
    assert "error[SW3108]" in out and "peak memory, GiB of 80.0" in out and "\x1b" not in out
    assert main(["explain", path, "--why-not", "tensor=8"]) == 0
    out = capsys.readouterr().out
    assert "it runs, and loses" in out and "tensor-parallel collectives, ms" in out
    assert main(["explain", path, "--why-not", "tensor=3"]) == 0
    assert "SW1203" in capsys.readouterr().out


def test_another_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`target` is asked as a key of the layout is; its answer is what `estimate` makes of that
    engine."""
    path = write_llama(tmp_path)
    assert main(["explain", path, "--why-not", "target=megatron,tensor=2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = answer["estimate"]["strategy"]
    assert (
        found["tensor"] == 2 and found["zero_stage"] <= 1 and answer["verdict"] in ("loses", "wins")
    )
    assert main(["estimate", path, "--set", "target=megatron", "--json", *pins(found)]) == 0
    assert json.loads(capsys.readouterr().out)["time"] == answer["estimate"]["time"]
    gemma = write_llama(
        tmp_path, "gemma.yaml", model={"source": "google/gemma-2-9b", "weights": "random"}
    )
    assert main(["explain", gemma, "--why-not", "target=megatron"]) == 0
    assert (
        "error[SW2051]: target: megatron does not support the model type 'gemma2'"
        in capsys.readouterr().out
    )
    assert main(["explain", path, "--why-not", "target=fsdp"]) == 1
    assert "SW3303" in capsys.readouterr().err


def pins(strategy: dict[str, Any]) -> list[str]:
    keys = (
        "tensor",
        "pipeline",
        "data",
        "micro_batch_size",
        "zero_stage",
        "virtual_stages",
        "sequence_parallel",
    )
    wanted = {**{key: strategy[key] for key in keys}, "expert": 1, "context": strategy["context"]}
    checkpointing = strategy["activation_checkpointing"]
    return [
        word
        for key, value in {**wanted, "activation_checkpointing": checkpointing}.items()
        for word in ("--set", f"parallelism.{key}={json.dumps(value)}")
    ]


def test_a_question_sets_aside_pins_of_every_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama(tmp_path, parallelism={"context": 2, "tensor": 4})
    assert main(["explain", path, "--why-not", "pipeline=1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        set(answer["ignored_pins"]) == {"context", "tensor"}
        and answer["estimate"]["strategy"]["context"] == 1
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("tp=4", "SW3303", "tensor"),
        ("tensr=4", "SW3303", "tensor"),
        ("tensor", "SW3303", "key=value"),
        ("tensor=2,tensor=4", "SW3303", "twice"),
        (" , ", "SW3303", "names no layout"),
        ("tensor=x", "SW1102", "tensor"),
        ("zero_stage=7", "SW11", "zero_stage"),
    ],
)
def test_a_mistyped_question(
    words: str, code: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", write_llama(tmp_path), "--why-not", words]) == 1
    err = capsys.readouterr().err
    assert code in err and says in err and "Traceback" not in err
