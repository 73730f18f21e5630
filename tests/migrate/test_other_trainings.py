"""What programs train in the place of next tokens is refused by name, in every form in which they
say it; what they train as a recipe does is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.diagnostics import Refusal
from shardwright.migrate.config_import import convert_config

LLAMA_FACTORY = "model_name_or_path: a/b\ndataset: d\ntemplate: llama3\ncutoff_len: 8\n"
V1 = "model: a/b\nmodel_class: llm\ntrain_dataset: d\n"
AXOLOTL = "base_model: a/b\ndatasets: [{path: d}]\nsequence_len: 8\nmicro_batch_size: 1\n"
TRL = "model_name_or_path: a/b\ndataset_name: d\nlearning_rate: 1.0e-5\n"
SWIFT = "model: a/b\ntuner_type: full\ndataset: [d]\n"
FILES = {
    **{f"{LLAMA_FACTORY}stage: {s}\n": ("LLaMA-Factory", t) for s, t in {
        "dpo": "preferences", "kto": "preferences", "rm": "a reward model",
        "ppo": "a policy by reinforcement", "$STAGE": "another task",
    }.items()},
    V1.replace("llm", "cls"): ("LLaMA-Factory v1", "another task"),
    **{f"{AXOLOTL}{line}\n": ("Axolotl", t) for line, t in {
        "rl: dpo": "preferences", "rl: ipo": "preferences", "rl: orpo": "preferences",
        "rl: grpo": "a policy by reinforcement", "rl: ebft": "another task",
        "reward_model: true": "a reward model", "process_reward_model: true": "a reward model",
    }.items()},
    **{f"{TRL}{line}\n": ("TRL", t) for line, t in {
        "loss_type: ipo": "preferences", "beta: 0.1": "preferences",
        "loss_type: dft": "another task",
        "num_generations: 8": "a policy by reinforcement", "desirable_weight: 1.0": "preferences",
        "reward_funcs: [r]": "a policy by reinforcement", "lmbda: 0.5": "a student by distillation",
        "center_rewards_coefficient: 0.01": "a reward model",
    }.items()},
    **{f"{SWIFT}{line}\n": ("ms-swift", t) for line, t in {
        "rlhf_type: dpo": "preferences", "rlhf_type: gkd": "a student by distillation",
        "rlhf_type: rm": "a reward model", "reward_funcs: [r]": "a policy by reinforcement",
        "task_type: seq_cls": "a classifier", "task_type: embedding": "embeddings",
        "task_type: reranker": "a reranker",
    }.items()},
}  # fmt: skip
MODEL = "--model_name_or_path a/b --learning_rate 1e-5"
COMMANDS = {
    **{f"trl {name} {MODEL}": ("TRL", t) for name, t in {
        "kto": "preferences",
        "grpo": "a policy by reinforcement", "rloo": "a policy by reinforcement",
        "gkd": "a student by distillation",
    }.items()},
    **{f"python examples/scripts/{name}.py {MODEL}": (p, t) for name, p, t in (
        ("dpo_vlm", "TRL", "preferences"), ("grpo_agent", "TRL", "a policy by reinforcement"),
        ("orpo", "a script", "preferences"), ("nash_md", "a script", "preferences"),
        ("ppo/ppo_tldr", "a script", "a policy by reinforcement"),
        ("prm", "a script", "a reward model"),
    )},
    "llamafactory-cli train --stage kto --model_name_or_path a/b": ("LLaMA-Factory", "preferences"),
    "llamafactory-cli dpo --model a/b": ("LLaMA-Factory v1", "preferences"),
    "lmf rm --model a/b": ("LLaMA-Factory v1", "a reward model"),
    "swift rlhf --model a/b": ("ms-swift", "preferences"),
    "swift rlhf --rlhf_type grpo --model a/b": ("ms-swift", "a policy by reinforcement"),
    "swift sft --task_type embedding --model a/b": ("ms-swift", "embeddings"),
    "megatron rlhf --rlhf_type dpo --model a/b": ("Megatron-SWIFT", "preferences"),
    "megatron sft --task_type seq_cls --model a/b": ("Megatron-SWIFT", "a classifier"),
}  # fmt: skip


def _refusal(file: Path | None, launch: str | None) -> str:
    with pytest.raises(Refusal) as raised:
        convert_config(None if file is None else str(file), launch, None, "/")
    (told,) = raised.value.diagnostics
    assert told.code == "SW1456" and told.help and "pretraining or supervised" in told.help
    return told.message


@pytest.mark.parametrize("text", FILES)
def test_a_file_of_another_training(text: str, tmp_path: Path) -> None:
    program, task = FILES[text]
    (tmp_path / "x.yaml").write_text(text)
    message = _refusal(tmp_path / "x.yaml", None)
    assert message.startswith(f"{program} trains {task}, and a recipe trains next tokens: ")


@pytest.mark.parametrize("launch", COMMANDS)
def test_a_command_of_another_training(launch: str) -> None:
    program, task = COMMANDS[launch]
    message = _refusal(None, launch)
    assert message.startswith(f"{program} trains {task}, and a recipe trains next tokens: ")


@pytest.mark.parametrize(
    ("text", "unsaid"),
    [
        (f"{LLAMA_FACTORY}stage: sft\n", ""),
        (f"{LLAMA_FACTORY}stage: pt\n", ""),
        (f"{LLAMA_FACTORY}stage: ${{STAGE:-sft}}\n", ""),
        (LLAMA_FACTORY, ""),
        (V1, "llamafactory-cli sft, dpo or rm"),
        (AXOLOTL, ""),
        (f"{AXOLOTL}rl: null\nreward_model: false\n", ""),
        (TRL, "trl sft, dpo, grpo, kto or reward"),
        (f"{TRL}loss_type: nll\n", "trl sft, dpo, grpo, kto or reward"),
        (SWIFT, "swift pt, sft or rlhf"),
        (f"{SWIFT}task_type: causal_lm\n", "swift pt, sft or rlhf"),
    ],
)
def test_a_training_of_next_tokens(text: str, unsaid: str, tmp_path: Path) -> None:
    """A file that does not say which trainer reads it gets a comment that says so."""
    (tmp_path / "x.yaml").write_text(text)
    notes = convert_config(str(tmp_path / "x.yaml"), None, None, "/").draft.comments("training")
    said = [note for note in notes if note.startswith("the file does not say what is trained: ")]
    assert [unsaid in note for note in said] == ([True] if unsaid else [])


@pytest.mark.parametrize(
    "launch",
    [
        *(f"trl sft {MODEL}", f"python sft_vlm.py {MODEL}"),
        *("swift sft --model a/b", "swift pt --model a/b", "megatron pt --model a/b"),
        *("llamafactory-cli sft --model a/b", f"python my_reward_free_sft.py {MODEL}"),
    ],
)
def test_a_command_of_next_tokens(launch: str) -> None:
    draft = convert_config(None, launch, None, "/").draft
    assert not [note for note in draft.comments("training") if "what is trained" in note]


PAIRS = f"{TRL}loss_type: sigmoid\nbeta: 0.2\nmax_length: 512\n"


@pytest.mark.parametrize(
    "launch", ["trl dpo --config x.yaml", "python dpo.py --config x.yaml", "trl.scripts.dpo"]
)
@pytest.mark.parametrize(
    ("loss_type", "objective"),
    [("sigmoid", {"name": "dpo"}), ("ipo", {"name": "ipo", "average": True})],
)
def test_trl_on_pairs_is_a_preference_recipe(
    launch: str, loss_type: str, objective: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(PAIRS.replace("sigmoid", loss_type))
    if launch.startswith("trl.scripts"):
        launch = f"accelerate launch -m {launch} --config x.yaml"
    launch = launch.replace("x.yaml", str(tmp_path / "x.yaml"))
    values = convert_config(None, launch, None, "/").draft.values
    for key, value in {**objective, "beta": 0.2}.items():
        assert values[f"training.objective.{key}"] == value
    assert values["data.kind"] == "preference" and values["training.sequence_length"] == 512


@pytest.mark.parametrize(
    "line", ["loss_type: robust", "ref_model: a/c", "rpo_alpha: 1.0", "beta: ${BETA}"]
)
def test_what_a_recipe_lacks_of_dpo_is_refused(line: str, tmp_path: Path) -> None:
    text = "".join(
        each + "\n" for each in PAIRS.splitlines() if each.split(":")[0] != line.split(":")[0]
    )
    (tmp_path / "x.yaml").write_text(f"{text}{line}\n")
    assert "preferences" in _refusal(None, f"trl dpo --config {tmp_path / 'x.yaml'}")


@pytest.mark.parametrize(
    "launch", ["trl reward --config x.yaml", "python reward_modeling.py --config x.yaml"]
)
@pytest.mark.parametrize("coefficient", [None, 0.01])
def test_trl_of_rewards_is_a_recipe(launch: str, coefficient: float | None, tmp_path: Path) -> None:
    line = "" if coefficient is None else f"center_rewards_coefficient: {coefficient}\n"
    (tmp_path / "x.yaml").write_text(f"{TRL}{line}max_length: 512\n")
    launch = launch.replace("x.yaml", str(tmp_path / "x.yaml"))
    values = convert_config(None, launch, None, "/").draft.values
    assert values["training.objective.name"] == "reward"
    assert values.get("training.objective.center_coefficient") == coefficient
    assert values["data.kind"] == "preference" and values["training.sequence_length"] == 512
