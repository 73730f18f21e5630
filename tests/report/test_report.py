"""The page's figures are the plan's, its timeline is the planner's step, and what it cannot read it
says."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.compile.compiled_folder import read_folder
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import resolve
from shardwright.plan.plan import read_plan
from shardwright.report.report_files import write_report
from shardwright.report.report_page import render_page
from shardwright.report.run_results import read_run
from shardwright.report.step_timeline import sampled_ranks, step_timeline
from shardwright.search.layout_search import search
from shardwright.utils.number_format import format_days
from tests.conftest import SMALL_RECIPE
from tests.report.folders import (
    compiled,
    small_mixture,
    small_with,
    two_islands,
    with_islands_run,
    with_run,
)
from tests.unit.models.factory import problem_of
from tests.unit.monitor.test_attempt_records import write_run as write_restarted_run


class PlanNumbers(HTMLParser):
    """Every `<data data-key>` of a page, and what its JSON script elements hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: list[tuple[str, Any]] = []
        self.scripts: dict[str, Any] = {}
        self._inside: str | None = None
        self.feed(page)
        self.scripts = {name: json.loads(text) for name, text in self.scripts.items()}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "data":
            self.values.append((str(given["data-key"]), json.loads(str(given["value"]))))
        self._inside = given.get("id") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data


def columns_of(item: Any) -> dict[str, list[float]]:
    """Return the columns of the data source with stages in a chart's JSON."""
    return columns_with(item, "stage")


def columns_with(item: Any, column: str) -> dict[str, list[Any]]:
    """Return the columns of the first data source that has this one, with arrays decoded."""
    if isinstance(item, dict):
        if item.get("type") == "map" and any(entry[0] == column for entry in item["entries"]):
            return {key: array(value) for key, value in item["entries"]}
        item = list(item.values())
    for part in item if isinstance(item, list) else []:
        if found := columns_with(part, column):
            return found
    return {}


def array(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        return list(value)
    data = gzip.decompress(base64.b64decode(value["array"]["data"]))
    return list(np.frombuffer(data, dtype=value["dtype"]))


def at(document: Any, key: str) -> Any:
    for part in key.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(SMALL_RECIPE, tmp_path_factory.mktemp("small"))


LAYOUTS = {
    "1f1b": SMALL_RECIPE,
    "dualpipev": small_with(
        {"pipeline": 2, "data": 2, "schedule": "dualpipev", "micro_batch_size": 1}
    ),
    "zero3": small_with({"data": 4, "zero_stage": 3, "micro_batch_size": 1}),
    "tensor": small_with({"tensor": 4}, global_batch_size=12),
    "auto": small_with({}),
    "islands": two_islands(SMALL_RECIPE),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_figure_is_the_plans_and_the_timeline_its_step(name: str, tmp_path: Path) -> None:
    folder = compiled(LAYOUTS[name], tmp_path)
    plan = json.loads((folder / "plan.json").read_text())
    subject = read_folder(folder)
    assert not subject.has_stale_prediction
    page, timeline = render_page(subject)
    found = PlanNumbers(page)
    assert len(found.values) > 30
    for key, value in found.values:
        assert value == at(plan, key), key
    assert found.scripts["plan-figures"]["predicted"] == plan["predicted"]
    step = plan["predicted"]["time"]["step_seconds"]
    assert timeline.simulated_seconds == pytest.approx(step, rel=1e-6)
    assert max(bar.stop_seconds for bar in timeline.bars) == pytest.approx(step, rel=1e-6)
    micro_batches = plan["strategy"]["gradient_accumulation_steps"]
    passes = [bar for bar in timeline.bars if bar.kind < 2]
    assert len(passes) == 2 * micro_batches * len(plan["stages"])
    for rank in timeline.ranks:
        parts = [getattr(rank, part) for part in rank.__slots__]
        assert sum(parts) == pytest.approx(step, rel=1e-6)
    memory = columns_of(found.scripts["items"]["memory"])
    for part in ("parameters", "gradients", "optimizer", "activations", "workspace"):
        told = [stage[f"{part}_bytes"] / 2**30 for stage in plan["predicted"]["memory"]["stages"]]
        assert memory[part] == told


def test_bars_of_a_rank_do_not_overlap(small: Path) -> None:
    subject = read_folder(small)
    timeline = step_timeline(subject.layout, subject.plan.predicted.time)
    for rank in range(subject.plan.strategy.pipeline):
        bars = sorted(
            (b for b in timeline.bars if b.rank == rank),
            key=lambda b: (b.start_seconds, b.stop_seconds),
        )
        for before, after in itertools.pairwise(bars):
            assert after.start_seconds >= before.stop_seconds - 1e-12


def test_many_bars_leave_ranks_out_evenly(small: Path) -> None:
    subject = read_folder(small)
    timeline = step_timeline(subject.layout, subject.plan.predicted.time)
    wide = dataclasses.replace(timeline, bars=timeline.bars * 32, ranks=timeline.ranks * 32)
    drawn = sampled_ranks(wide, len(wide.bars) // 8)
    assert drawn[0] == 0 and drawn[-1] == 63 and len(drawn) == 8
    assert sampled_ranks(timeline, 10**6) == (0, 1)


def test_the_space_holds_what_the_search_ranks(small: Path) -> None:
    from shardwright.report.layout_space import layout_space

    subject = read_folder(small)
    recipe, graph, cluster = subject.recipe, subject.graph, subject.cluster
    space = layout_space(problem_of(recipe, graph, cluster), subject.estimate)
    ranked = search(problem_of(recipe, graph, cluster)).ranked
    running = {p.strategy: p for p in space.points if p.pinned and not p.code}
    assert set(running) == {e.strategy for e in ranked}
    for estimate in ranked:
        point = running[estimate.strategy]
        assert (point.step_seconds, point.peak_bytes) == (
            estimate.time.step_seconds,
            estimate.memory.peak_bytes,
        )
    assert subject.plan.strategy in running
    assert set(space.pins) == {"tensor", "pipeline", "data", "schedule", "micro_batch_size"}
    assert len(space.points) == space.legal + space.forbidden
    assert all(
        p.code.startswith("SW3") and p.reason
        for p in space.points
        if p.verdict in ("ruled out", "does not fit")
    )


def test_a_trace_that_perfetto_reads(small: Path, tmp_path: Path) -> None:
    write_report(small, tmp_path / "page.html", tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    step = json.loads((small / "plan.json").read_text())["predicted"]["time"]["step_seconds"]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events} == {0, 1}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(step * 1e6, rel=1e-6)
    assert {e["name"] for e in trace["traceEvents"] if e["ph"] == "M"} == {
        "process_name",
        "thread_name",
    }


def test_a_run_is_compared_and_its_text_is_only_text(small: Path, tmp_path: Path) -> None:
    folder = with_run(
        Path(shutil.copytree(small, tmp_path / "out")), 60, cause="<script>alert('x')</script>"
    )
    page, _ = render_page(read_folder(folder))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "LlamaForCausalLM, weights random (from scratch), on" in page
    assert "5.0000" not in page and "→ 2.669" in page  # the last whole line
    assert "<td>3.0</td>" in page and "GiB on the peak-memory CPU rank" in page
    assert page.count('id="chart-loss"') == 1
    assert 'id="chart-loss"' not in render_page(read_folder(small))[0]


def test_a_mixtures_map_has_an_axis_of_experts(small: Path, tmp_path: Path) -> None:
    folder = compiled(small_mixture(), tmp_path)
    subject = read_folder(folder)
    page, _ = render_page(subject)
    found = PlanNumbers(page)
    cells = columns_with(found.scripts["items"]["cluster"], "expert")
    plan = subject.plan
    assert [int(cell) for cell in cells["expert"]] == [plan.expert_rank_of(r) for r in plan.ranks]
    assert sorted(set(map(int, cells["expert"]))) == [0, 1]
    assert found.scripts["palettes"]["expert"]["degree"] == 2
    assert 'data-axis="expert"' in page and re.search(r"expert \S 2<", page)
    assert "expert rank 0: experts 0 to 1" in page and "expert rank 1: experts 2 to 3" in page
    dense = render_page(read_folder(small))[0]
    assert 'data-axis="expert"' not in dense
    assert "expert" not in PlanNumbers(dense).scripts["palettes"]


def test_curves_of_a_run(small: Path, tmp_path: Path) -> None:
    folder = with_run(Path(shutil.copytree(small, tmp_path / "out")), 60)
    path = folder / "run" / "metrics.jsonl"
    *lines, half = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[3] |= {"grad_norm": None, "finite": False}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + half)
    page, _ = render_page(read_folder(folder))
    items = PlanNumbers(page).scripts["items"]
    for name, field, title in (
        ("norm", "grad_norm", "Gradient norm"),
        ("rate", "learning_rate", "Learning rate"),
        ("tokens", "tokens_per_second", "Tokens a second"),
    ):
        assert page.count(f'id="chart-{name}"') == 1 and f"<h3>{title}" in page
        drawn = columns_with(items[name], "value")
        assert list(drawn["step"]) == list(range(1, 61))
        for row, value in zip(rows, drawn["value"], strict=True):
            # Bokeh writes a gap as a number that JSON lacks.
            gap = {"type": "number", "value": "nan"}
            assert value == gap if row.get(field) is None else value == row[field]
    assert 'id="chart-norm"' not in render_page(read_folder(small))[0]


@pytest.mark.parametrize(
    ("share", "headroom", "badge", "sentence"),
    [
        (0.08, "auto", "fits", "It fits: the rank that needs the most has 92% of its memory left"),
        (0.95, "auto", "tight", "It may run out of memory: the rank that needs the most has 5%"),
        (0.80, 0.1, "fits", "has 20% of its memory left, and the recipe asks for 10%."),
        (1.25, "auto", "does not fit", "the rank that needs the most memory would need 10.0 of 8"),
    ],
)
def test_what_the_page_says_of_the_memory(
    share: float, headroom: object, badge: str, sentence: str, tmp_path: Path
) -> None:
    parallelism = {**SMALL_RECIPE["parallelism"], "memory_headroom": headroom}
    subject = read_folder(compiled({**SMALL_RECIPE, "parallelism": parallelism}, tmp_path))
    memory = subject.plan.predicted.memory
    memory = dataclasses.replace(
        memory, peak_bytes=int(share * memory.capacity_bytes), fits=share < 1
    )
    predicted = dataclasses.replace(subject.plan.predicted, memory=memory)
    plan = dataclasses.replace(subject.plan, predicted=predicted)
    page, _ = render_page(dataclasses.replace(subject, plan=plan))
    text = words(page)
    assert sentence in text and f"{badge} tensor=2" in text
    assert "memory_headroom: auto keeps free" not in text


def test_islands_and_the_whole(tmp_path: Path) -> None:
    folder = compiled(two_islands(SMALL_RECIPE), tmp_path)
    plain, _ = render_page(read_folder(folder))
    assert (
        'id="chart-islands-loss"' not in plain
        and "take islands" in plain
        and "arXiv 2503.09799: theirs" in plain
    )
    with_islands_run(folder)
    page, timeline = render_page(read_folder(folder))
    found = PlanNumbers(page).scripts["items"]
    plan = read_folder(folder).plan
    cells = columns_with(found["cluster"], "island")
    assert list(cells["island"]) == [0] * len(plan.ranks) + [1] * len(plan.ranks)
    assert list(cells["rank"]) == 2 * [rank.rank for rank in plan.ranks]
    assert all(
        rank.outer_comm_seconds == plan.predicted.time.outer_comm_seconds > 0
        for rank in timeline.ranks
    )
    whole = columns_with(found["islands-loss"], "islands")
    assert whole["step"] == list(range(1, 61))
    assert whole["islands"][40:] == ["0"] * 20 and whole["islands"][:40] == ["0, 1"] * 40
    text = " ".join(words(page).split())
    assert "killed (signal 9)" in text and f"{256 * (40 * 2 + 20):,} tokens by the islands" in text
    assert "in 6 outer steps" in text and page.count('id="chart-islands-waits"') == 1
    assert 'id="islands"' in render_page(read_folder(folder / "island-1"))[0]


def test_no_text_of_a_folder_ends_a_script(small: Path, tmp_path: Path) -> None:
    """A stranger's plan.json: its name stands in the page's JSON too."""
    folder, bad = Path(shutil.copytree(small, tmp_path / "out")), "</script><!--<script>alert('x')"
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "name": bad}))
    plain, page = (render_page(read_folder(out))[0] for out in (small, folder))
    found = PlanNumbers(page)
    assert (
        found.scripts["plan-figures"]["name"] == bad
        and found.scripts.keys() == PlanNumbers(plain).scripts.keys()
    )
    assert bad not in page and page.count("</script>") == plain.count("</script>")


def test_a_run_whose_loss_is_no_number_any_more(small: Path, tmp_path: Path) -> None:
    folder = with_run(Path(shutil.copytree(small, tmp_path / "out")), 60)
    metrics = folder / "run" / "metrics.jsonl"
    *lines, _ = metrics.read_text().splitlines()
    lost = {**json.loads(lines[-1]), "loss": None, "grad_norm": None, "finite": False}
    metrics.write_text("\n".join([*lines[:-1], json.dumps(lost)]) + "\n")
    page, _ = render_page(read_folder(folder))
    assert "→ nan" in page and page.count('id="chart-loss"') == 1
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL):
        json.loads(text, parse_constant=pytest.fail)


def words(page: str) -> str:
    """The text of the page's body, without its scripts."""
    return " ".join(
        re.sub(r"<[^>]+>", " ", page.partition("<script")[0].partition("<body>")[2]).split()
    ).replace(" ,", ",")


def test_no_error_is_told_where_none_was_measured(small: Path, tmp_path: Path) -> None:
    folder = with_run(Path(shutil.copytree(small, tmp_path / "out")), 60)
    text = words(render_page(read_folder(folder))[0])
    assert "±" not in text, text.partition("±")
    assert "a step, not calibrated" in text and "of 8.0, not calibrated" in text
    assert (
        "not calibrated (a CPU): fewer than 20 published runs of 2 sources are of that kind" in text
    )
    assert "predictions of 20" not in text and "one prediction in twenty" not in text
    document = {
        **small_with({}),
        "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "a100-sxm4-80gb"},
    }
    document["training"] |= {"precision": "bf16"}
    document["parallelism"] = {"zero_stage": 1, "data": 4, "micro_batch_size": 1}
    folder = compiled(document, tmp_path / "a100")
    error = read_folder(folder).estimate.error
    text = words(render_page(read_folder(folder))[0])
    assert error.step_time is not None and error.memory is not None
    assert f"a step, ± {error.step_time:.1%}" in text
    assert (
        f"the step ± {error.step_time:.1%} ({error.step_time_regime}); the memory ± "
        f"{error.memory:.1%}"
    ) in text
    assert re.search(r"±: holds 80 % of the regime.+ published runs, of \d+ of \d+ projects", text)


def test_epochs_have_steps_once_the_data_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("some text of its own " * 200)
    document = small_with({"data": 4, "micro_batch_size": 2})
    del document["training"]["steps"]
    document["training"]["epochs"] = 3
    document["data"] = {"kind": "text", "path": "corpus.txt", "tokenizer": "byte"}
    folder = compiled(document, tmp_path)
    page, _ = render_page(read_folder(folder))
    text = words(page)
    assert "3 epochs, in steps that are known once the data is prepared" in text
    assert "0 seconds" not in text and "0 steps" not in text
    assert not {"training.steps", "predicted.training.days"} & {
        key for key, _ in PlanNumbers(page).values
    }
    _, data = resolve(read_plan(folder), prepared(folder))
    text = words(render_page(read_folder(with_run(folder, 60)))[0])
    steps, step = data.steps, read_plan(folder).predicted.time.step_seconds
    assert f"{format_days(steps * step / 86400)} {steps:,} steps, 3 epochs" in text
    assert steps == 48 and "known once" not in text


def prepared(folder: Path) -> Path:
    prepare(read_plan(folder), folder, limit_bytes=None)
    return folder


def test_the_validation_curve_is_drawn(small: Path, tmp_path: Path) -> None:
    folder = with_run(Path(shutil.copytree(small, tmp_path / "out")), 60)
    lines: list[dict[str, Any]] = [
        {"step": k, "loss": 3 - k / 40, "perplexity": 2.0, "tokens": 9, "seconds": 1, "attempt": 1}
        for k in (20, 40)
    ]
    lines += [
        {**lines[0], "step": 60, "loss": None, "perplexity": None, "finite": False},
        {"step": "half"},
    ]
    (folder / "run" / "evaluation.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"st'
    )
    subject = read_folder(folder)
    run = read_run(folder, subject.plan)
    assert run is not None
    assert [(e.step, e.loss) for e in run.evaluations[:2]] == [(20, 2.5), (40, 2.0)]
    assert run.evaluations[2].step == 60 and math.isnan(run.evaluations[2].loss)
    page, _ = render_page(subject)
    assert 'data-series="validation"' in page and "validation loss, first and last 2.5000" in words(
        page
    )
    chart = json.dumps(PlanNumbers(page).scripts["items"]["loss"])
    assert '"perplexity"' in chart and '"name": "validation"' in chart
    (folder / "run" / "evaluation.jsonl").unlink()
    assert "validation" not in words(render_page(subject)[0])


def test_the_noise_scale_is_told(small: Path, tmp_path: Path) -> None:
    folder = with_run(shutil.copytree(small, tmp_path / "out"), 8)
    assert "noise scale" not in words(render_page(read_folder(folder))[0])
    of = {"gradient_square": 2.0, "row_variance": 32.0, "rows": 8}
    path = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) | {"noise_scale": of} for line in path.read_text().splitlines()[:8]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = words(render_page(read_folder(folder))[0])
    assert "Your batch is 0.5 to 0.5 of the noise scale: noise scale 16 rows" in told
    assert "a proxy, not the critical batch size." in told


def test_saves_are_shown_beside_the_prediction(small: Path, tmp_path: Path) -> None:
    folder = with_run(Path(shutil.copytree(small, tmp_path / "out")), 9)
    text = words(render_page(read_folder(folder))[0])
    assert "With saves, failures and restarts" in text and "after the last step only" in text
    assert "seconds a save" not in text
    line = {"step": 10, "seconds": 0.25, "bytes": 10**9, "node_bytes": 10**9, "attempt": 1}
    (folder / "run" / "saves.jsonl").write_text(json.dumps(line) + "\n")
    text = words(render_page(read_folder(folder))[0])
    assert (
        "seconds a save (median of 1)" in text and "GB/s of a node's saves 0.98 4 +308.2%" in text
    )


def test_attempts_and_what_they_cost(tmp_path: Path) -> None:
    """A row for each attempt of a run that was restarted, and nothing of one that was not."""
    folder = compiled(SMALL_RECIPE, tmp_path)
    with_run(folder, 20)
    assert "seconds lost" not in render_page(read_folder(folder))[0]
    shutil.rmtree(folder / "run")
    write_restarted_run(folder)
    page, _ = render_page(read_folder(folder))
    assert "2 restarts, 29 s lost (rank 18 s, host 11 s); goodput 15%" in page
    row = (
        '<tr><th>1</th><td>1 to 5</td><td>3</td><td class="text">data=3</td>'
        '<td class="text">host</td><td>1</td><td class="text">b</td><td>11.0</td></tr>'
    )
    assert row in page
