"""Every kind of bad recipe: its code, its line, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.diagnostics.diagnostic_rendering import location_of, render_diagnostics
from shardwright.recipe.recipe_loader import load_recipe

GOOD = """\
version: 1
name: tiny
model:
  config: {model_type: llama, hidden_size: 64}
cluster:
  nodes: 1
  gpus_per_node: 4
  gpu: cpu
training:
  sequence_length: 128
  global_batch_size: 8
  steps: 20
"""

JSON = """\
{
  "version": 1,
  "name": "tiny",
  "model": {"config": {"model_type": "llama"}},
  "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "cpu"},
  "training": {"sequence_length": 128, "global_batch_size": 8, "steps": 20}
}
"""


def refusal(text: str | bytes, folder: Path, overrides: tuple[str, ...] = ()) -> Refusal:
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    with pytest.raises(Refusal) as caught:
        load_recipe(path, overrides)
    assert caught.value.source is not None
    render_diagnostics(caught.value.diagnostics, caught.value.source, color=True)
    return caught.value


def told(found: Refusal) -> list[tuple[str, int]]:
    places = [location_of(diagnostic, found.source) for diagnostic in found.diagnostics]
    return [
        (d.code, place.line if place else -1)
        for d, place in zip(found.diagnostics, places, strict=True)
    ]


def only(found: Refusal) -> Diagnostic:
    assert len(found.diagnostics) == 1, told(found)
    return found.diagnostics[0]


def inline(keys: str) -> str:
    """Return the recipe with an inline GPU that has these keys too."""
    gpu = "{memory_gib: 80, hbm_gbytes_per_second: 3350, peak_tflops: {bf16: 989}, "
    return changed("gpu: cpu", f"gpu: {gpu}{keys}}}")


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_the_good_one_is_good(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    assert load_recipe(tmp_path / "recipe.yaml").name == "tiny"


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "SW1004", 1),
        ("# nothing\n", "SW1004", 1),
        ("---\n", "SW1004", 1),
        ("just text\n", "SW1012", 1),
        ("[1, 2]", "SW1012", 1),
        (b"version: 1\nname: \xff\n", "SW1003", 2),
        (GOOD + "data: {kind: text, path: 'x}\n", "SW1005", 13),
        (GOOD + "data: [1, 2\n", "SW1005", 14),
        (GOOD + "objective: a: b\n", "SW1005", 13),
        (GOOD + "\tobjective: cost\n", "SW1005", 13),
        (GOOD + "objective: 'a\x07b'\n", "SW1005", 13),
        (GOOD + "objective: @x\n", "SW1005", 13),
        (GOOD + 'objective: "\\q"\n', "SW1005", 13),
        ("%YAML 1.1\n---\n" + GOOD, "SW1005", 2),
        (GOOD + "name: again\n", "SW1006", 13),
        (JSON.replace('"name"', '"version": 1, "name"'), "SW1006", 3),
        (GOOD + "<<: {objective: cost}\n", "SW1007", 13),
        (GOOD + "objective: !!str cost\n", "SW1008", 13),
        (GOOD + "objective: !python/object:os.system cost\n", "SW1008", 13),
        (GOOD + "---\nname: b\n", "SW1009", 13),
        (GOOD + "data: *nowhere\n", "SW1010", 13),
        (GOOD + "data: &d {kind: text, path: *d}\n", "SW1010", 13),
        (GOOD + "data: " + "[" * 60 + "]" * 60, "SW1011", 13),
        ("[" * 200_000, "SW1011", 1),
        ('{"a":' * 100_000, "SW1011", 1),
        ("#" * 600_000, "SW1011", 0),
        (changed("steps: 20", "steps: 20\n  gradient_clipping: .nan"), "SW1013", 13),
        (changed("steps: 20", "steps: 20\n  gradient_clipping: NaN"), "SW1013", 13),
        (changed("steps: 20", "steps: 20\n  gradient_clipping: -.Inf"), "SW1013", 13),
        (changed("steps: 20", "steps: 20\n  gradient_clipping: 1e999"), "SW1013", 13),
        (changed("steps: 20", "tokens: 9007199254740993"), "SW1014", 12),
        (changed("steps: 20", "tokens: 1e16"), "SW1014", 12),
        (changed("hidden_size: 64", "hidden_size: " + "9" * 6000), "SW1014", 4),
        (GOOD + "[a, b]: 1\n", "SW1015", 13),
        (GOOD + "? {a: b}\n: 1\n", "SW1015", 13),
        (changed("model_type: llama", 'model_type: "\\ud800"'), "SW1016", 4),
        (JSON.replace('"cluster"', '"c\\ud800luster"'), "SW1016", 5),
        (GOOD + "objectiv: cost\n", "SW1101", 13),
        (changed("  steps: 20", "  lr: 1e-3\n  steps: 20"), "SW1101", 12),
        (GOOD + "data: {kind: text, path: a, template: b}\n", "SW1101", 13),
        (changed("nodes: 1", 'nodes: "1"'), "SW1102", 6),
        (changed("steps: 20", "steps: true"), "SW1102", 12),
        (changed("steps: 20", "steps: 2.5"), "SW1102", 12),
        (changed("name: tiny", "name: 8"), "SW1102", 2),
        (changed("name: tiny", "name:"), "SW1102", 2),
        (changed("  config: {model_type: llama, hidden_size: 64}", "  - a"), "SW1102", 3),
        (changed("steps: 20", "steps: 20\n  seed:"), "SW1102", 13),
        (changed("steps: 20", "steps: 20\n  optimizer: {betas: 0.9}"), "SW1102", 13),
        (GOOD + "parallelism: {tensor: automatic}\n", "SW1102", 13),
        (GOOD + "parallelism: {sequence_parallel: yes}\n", "SW1102", 13),
        (changed("version: 1", "version: 2"), "SW1103", 1),
        (changed("steps: 20", "steps: 20\n  precision: bf-16"), "SW1103", 13),
        (GOOD + "data: {kind: texts, path: a}\n", "SW1103", 13),
        (changed("size: 64}", "size: 64}\n  kernels: liger"), "SW1103", 5),
        (changed("steps: 20", "steps: 0"), "SW1104", 12),
        (changed("steps: 20", "steps: 20\n  optimizer: {betas: [0.9, 1.0]}"), "SW1104", 13),
        (changed("steps: 20", "steps: 20\n  optimizer: {lr: 0}"), "SW1104", 13),
        (GOOD + "parallelism: {zero_stage: 4}\n", "SW1104", 13),
        (GOOD + "launch: {master_port: 70000}\n", "SW1104", 13),
        (changed("  gpu: cpu\n", ""), "SW1105", 5),
        (changed("name: tiny\n", ""), "SW1105", 1),
        (GOOD + "data: {}\n", "SW1105", 13),
        (GOOD + "data: {kind: text}\n", "SW1105", 13),
        (GOOD + "data: {mixture: [{kind: text, path: a}]}\n", "SW1105", 13),
        (changed("name: tiny", "name: two words"), "SW1106", 2),
        (changed("name: tiny", 'name: "tiny\\n"'), "SW1106", 2),
        (changed("name: tiny", "name: $(reboot)"), "SW1106", 2),
        (changed("name: tiny", "name: " + "x" * 65), "SW1106", 2),
        (GOOD + 'data: {kind: text, path: "a\\nb"}\n', "SW1106", 13),
        (GOOD + "data: {kind: text, path: ''}\n", "SW1106", 13),
        (GOOD + 'launch: {env: {A: "x\\ny"}}\n', "SW1106", 13),
        (GOOD + "launch: {env: {'A B': x}}\n", "SW1106", 13),
        (GOOD + "launch: {env_from: [1TOKEN]}\n", "SW1106", 13),
        (GOOD + 'launch: {slurm: {account: "a; reboot"}}\n', "SW1106", 13),
        (GOOD + "launch: {master_addr: $(hostname)}\n", "SW1106", 13),
        (changed("steps: 20", "steps: 20\n  optimizer: {betas: [0.9]}"), "SW1107", 13),
        (GOOD + "data: {mixture: []}\n", "SW1107", 13),
        (changed("config: {model_type: llama, hidden_size: 64}", "revision: main"), "SW1201", 3),
        (changed("  steps: 20\n", ""), "SW1201", 9),
        (GOOD + "validation: {every_steps: 5}\n", "SW1201", 13),
        (GOOD + "checkpoint: {every_steps: 0}\n", "SW1104", 13),
        (GOOD + "checkpoint: {every_steps: atuo}\n", "SW1102", 13),
        (changed("gpu: cpu", "gpu: cpu\n  node_mtbf_hours: 0"), "SW1104", 9),
        (changed("gpu: cpu", "gpu: cpu\n  node_mtbf_hours: -3"), "SW1104", 9),
        (changed("gpu: cpu", "gpu: cpu\n  node_mtbf_hours: 54 days"), "SW1102", 9),
        (inline("watts: 0"), "SW1104", 8),
        (inline("watts: a lot"), "SW1102", 8),
        (inline("compute_units: 1.5"), "SW1102", 8),
        (inline("compute_units: 0"), "SW1104", 8),
        (inline("cache_mib: -1"), "SW1104", 8),
        (inline("attention: {forward_tflops: 300}"), "SW1105", 8),
        (inline("attention: {forward_tflops: 0, backward_tflops: 1}"), "SW1104", 8),
        (inline("attention: 300"), "SW1102", 8),
        (inline("attention: {forward_tflops: 9, backward_tflops: 9, dim: 64}"), "SW1101", 8),
        (changed("gpu: cpu", "gpu: cpu\n  nvlink_domain_gpus: 0"), "SW1104", 9),
        (changed("gpu: cpu", "gpu: cpu\n  nvlink_domain_gpus: 7.5"), "SW1102", 9),
        (changed("gpu: cpu", "gpu: cpu\n  nvlink_domain_gpus: a rack"), "SW1102", 9),
        (changed("gpu: cpu", "gpu: cpu\n  nvlink_domain_gpus: 6"), "SW1224", 9),
        (changed("gpu: cpu", "gpu: cpu\n  nvlink_domain_gpus: 3"), "SW1224", 9),
        (changed("gpu: cpu", "gpu: cpu\n  checkpoint_gbytes_per_second: 0"), "SW1104", 9),
        (changed("gpu: cpu", "gpu: cpu\n  checkpoint_gbytes_per_second: 1e12"), "SW1104", 9),
        (changed("  config:", "  source: org/name\n  config:"), "SW1202", 5),
        (changed("steps: 20", "steps: 20\n  tokens: 1e9"), "SW1202", 13),
        (
            changed("steps: 20", "steps: 20\n  scheduler: {warmup_steps: 2, warmup_ratio: 0.1}"),
            "SW1202",
            13,
        ),
        (
            changed("steps: 20", "steps: 20\n  scheduler: {min_lr: 0, min_lr_ratio: 0.1}"),
            "SW1202",
            13,
        ),
        (GOOD + "validation: {fraction: 0.1, kind: text, path: a}\n", "SW1202", 13),
        (GOOD + "parallelism: {tensor: 3}\n", "SW1203", 13),
        (GOOD + "parallelism: {tensor: 2, pipeline: 4}\n", "SW1203", 13),
        (GOOD + "parallelism: {tensor: 2, pipeline: 2, data: 2}\n", "SW1203", 13),
        (GOOD + "parallelism: {tensor: 1, pipeline: 1, data: 2}\n", "SW1203", 13),
        (GOOD + "parallelism: {micro_batch_size: 3}\n", "SW1204", 11),
        (
            changed("global_batch_size: 8", "global_batch_size: 6") + "parallelism: {data: 4}\n",
            "SW1204",
            11,
        ),
        (
            changed("global_batch_size: 8", "global_batch_size: 6")
            + "parallelism: {tensor: 1, pipeline: 1}\n",
            "SW1204",
            11,
        ),
        (GOOD + "parallelism: {data: 4, micro_batch_size: 4}\n", "SW1204", 11),
        (changed("steps: 20", "steps: 20\n  scheduler: {warmup_steps: 20}"), "SW1205", 13),
        (changed("steps: 20", "tokens: 2048\n  scheduler: {warmup_steps: 2}"), "SW1205", 13),
        (changed("steps: 20", "steps: 20\n  scheduler: {name: wsd}"), "SW1205", 13),
        (changed("steps: 20", "steps: 20\n  scheduler: {decay_steps: 3}"), "SW1205", 13),
        (
            changed(
                "steps: 20", "steps: 20\n  scheduler: {name: wsd, warmup_steps: 15, decay_steps: 6}"
            ),
            "SW1205",
            13,
        ),
        (changed("steps: 20", "steps: 20\n  scheduler: {min_lr: 1e-2}"), "SW1205", 13),
        *(
            (changed("steps: 20", f"steps: 20\n  scheduler: {{{keys}}}"), code, 13)
            for code, each in {
                "SW1205": (
                    "name: cosine_with_min_lr",
                    "name: cosine_warmup_with_min_lr, warmup_lr_rate: 0.1",
                    "name: warmup_stable_decay, decay_type: linear",
                    "name: warmup_stable_decay, warmup_steps: 15, decay_steps: 6",
                    "name: constant_with_warmup, min_lr: 1e-5",
                    "name: cosine_with_restarts, min_lr_ratio: 0.1",
                    "name: inverse_sqrt, num_cycles: 2",
                    "name: polynomial, min_lr: 1e-6",
                    "name: polynomial, lr_end: 0.5",
                    "power: 2",
                    "name: linear, timescale: 20",
                    "name: cosine_with_min_lr, min_lr: 1e-5, warmup_lr_rate: 0.1",
                    "warmup_type: cosine",
                    "name: linear, decay_type: cosine",
                ),
                "SW1103": (
                    "name: reduce_lr_on_plateau",
                    "name: greedy",
                    "name: wsd, decay_steps: 3, decay_type: exponential",
                    "first_step: 2",
                ),
                "SW1104": ("name: inverse_sqrt, timescale: 0", "num_cycles: 0"),
            }.items()
            for keys in each
        ),
        (changed("steps: 20", "steps: 20\n  gradient_accumulation_dtype: fp16"), "SW1206", 13),
        (
            changed(
                "steps: 20", "steps: 20\n  precision: fp32\n  gradient_accumulation_dtype: bf16"
            ),
            "SW1206",
            14,
        ),
        (changed("nodes: 1", "nodes: auto"), "SW1207", 6),
        (changed("steps: 20", "steps: 20\n  days_at_most: 3"), "SW1207", 13),
        (GOOD + "launch: {launcher: pdsh, slurm: {account: a}}\n", "SW1208", 13),
        (changed("  config:", "  weights: pretrained\n  config:"), "SW1209", 4),
        (changed("steps: 20", "epochs: 2") + "data: {kind: synthetic}\n", "SW1210", 12),
        (GOOD + "launch: {env: {A: x}, env_from: [A]}\n", "SW1211", 13),
    ],
)
def test_one_mistake_one_diagnostic(
    text: str | bytes, code: str, line: int, tmp_path: Path
) -> None:
    found = refusal(text, tmp_path)
    assert told(found) == [(code, line)]
    diagnostic = found.diagnostics[0]
    assert diagnostic.help and "\n" not in diagnostic.message


def test_all_independent_errors_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        changed("name: tiny", "name: a b")
        .replace("nodes: 1", 'nodes: "1"')
        .replace("steps: 20", "step: 20")
    )
    text += (
        "parallelism: {zero_stage: 9, bucket: 1}\nlaunch: {launcher: local, slurm: {qos: "
        "q}}\nname: b\nx: .inf\n"
    )
    assert told(refusal(text, tmp_path)) == [
        ("SW1106", 2),
        ("SW1102", 6),
        ("SW1101", 12),
        ("SW1104", 13),
        ("SW1101", 13),
        ("SW1208", 14),
        ("SW1006", 15),
        ("SW1013", 16),
    ]


def test_a_misspelt_required_key_is_told_once(tmp_path: Path) -> None:
    diagnostic = only(refusal(changed("sequence_length", "seqence_length"), tmp_path))
    assert (diagnostic.code, diagnostic.help) == ("SW1101", "Did you mean `sequence_length`?")


@pytest.mark.parametrize(
    ("line", "help"),
    [
        ("  lr: 1e-3", "`lr` belongs under `training.optimizer`."),
        ("  learning_rate: 1e-3", "`lr` belongs under `training.optimizer`."),
        ("  tensor_parallel_size: 2", "`tensor` belongs under `parallelism`."),
        ("  seq_len: 2", "Did you mean `sequence_length`?"),
        ("  zero_stage: 2", "`zero_stage` belongs under `parallelism`."),
        ("  gradient_cliping: 2", "Did you mean `gradient_clipping`?"),
        ("  target: megatron", "`target` belongs at the top of the recipe."),
        ("  xyzzy: 2", "The keys here are sequence_length, global_batch_size,"),
    ],
)
def test_unknown_keys_say_where_to_go(line: str, help: str, tmp_path: Path) -> None:
    diagnostic = only(refusal(GOOD + line + "\n", tmp_path))
    assert diagnostic.code == "SW1101"
    assert help in diagnostic.help


@pytest.mark.parametrize(
    ("old", "new", "help"),
    [
        ("nodes: 1", 'nodes: "8"', "Write 8 without quotes."),
        ("steps: 20", "steps: 1_000", "Write 1000."),
        ("name: tiny", "name: 8", 'Write "8" in quotes.'),
        ("steps: 20", "steps: 20\n  precision: BF16", "Did you mean `bf16`?"),
        ("steps: 20", "steps: 20\n  precision: fp8", "Write bf16, fp16 or fp32."),
        ("steps: 20", "steps: 20\n  precision: fp64", "Write bf16, fp16 or fp32."),
        ("nodes: 1", "nodes: 1\n  shared_filesystem: no", "Write false; in YAML 1.2 no is text."),
    ],
)
def test_help_says_what_to_write(old: str, new: str, help: str, tmp_path: Path) -> None:
    assert only(refusal(changed(old, new), tmp_path)).help == help


def test_nearest_valid_values(tmp_path: Path) -> None:
    assert only(refusal(GOOD + "parallelism: {tensor: 3}\n", tmp_path)).valid == ("1", "2", "4")
    batch = changed("global_batch_size: 8", "global_batch_size: 10") + "parallelism: {data: 4}\n"
    assert only(refusal(batch, tmp_path)).valid == ("8", "12")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, code in (
        (tmp_path / "none.yaml", "SW1001"),
        (tmp_path, "SW1002"),
        (Path("a\0b"), "SW1001"),
    ):
        with pytest.raises(Refusal) as caught:
            load_recipe(path)
        assert [d.code for d in caught.value.diagnostics] == [code]


def test_aliases_are_followed_but_bounded(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "data: &d {kind: text, path: a}\nvalidation: *d\n")
    recipe = load_recipe(path)
    assert recipe.validation is not None and recipe.validation.data is not None
    assert recipe.validation.data.path == str(tmp_path / "a")
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert told(refusal("\n".join(laughs), tmp_path)) == [("SW1011", 5)]


def test_set_errors_point_at_the_command_line(tmp_path: Path) -> None:
    overrides = (
        "training.steps=5",
        "training.stepz=5",
        "nonsense",
        "name.first=a",
        "training.seed=[1",
        "version=1",
    )
    found = refusal(GOOD, tmp_path, overrides)
    places = [location_of(d, found.source) for d in found.diagnostics]
    assert [
        (d.code, p.file, p.line, p.column)
        for d, p in zip(found.diagnostics, places, strict=True)
        if p
    ] == [
        ("SW1101", "--set", 2, 1),
        ("SW1031", "--set", 3, 1),
        ("SW1032", "--set", 4, 1),
        ("SW1005", "--set", 5, 17),
    ]
