"""List the training objectives: the examples that each takes, and its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.recipe.literal_types import TaskName
from shardwright.utils.json_values import JsonObject

NEXT_TOKEN = "next-token"
SCORING_TASK: TaskName = "sequence-classification"
"""The task of a reward model."""
SCORING_HEAD = "score"
"""The linear of a reward model that gives a token its score."""
PREFERENCE_KIND = "preference"
"""The kind of data whose examples are a chosen and a rejected completion of one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveTraits:
    """Describe an objective.

    sequences_per_example: sequences of an example that are trained on. compares_pairs: an example
    is a chosen and a rejected completion. reads_labels: an example is a completion and whether it
    is desirable, and beside it one of another prompt, of which only the log-probability is read.
    reads_reference: the loss reads the log-probabilities of a reference model. reads_teacher: it
    reads another model's most probable tokens. scores_sequences: the model is a reward model, of
    task sequence-classification, which gives a sequence one number. defaults: of the keys that the
    objective takes.
    """

    sequences_per_example: int = 1
    compares_pairs: bool = False
    reads_labels: bool = False
    reads_reference: bool = False
    reads_teacher: bool = False
    scores_sequences: bool = False
    defaults: JsonObject = field(default_factory=dict)

    @property
    def reads_preferences(self) -> bool:
        """Return whether the data is of kind preference, and the metrics are rewards."""
        return self.compares_pairs or self.reads_labels

    @property
    def forward_only_passes(self) -> int:
        """Return the passes of a step without a backward one, over as many sequences as are
        trained on."""
        return int(self.reads_labels)


def _pairs(*, reads_reference: bool, **defaults: float | bool) -> ObjectiveTraits:
    return ObjectiveTraits(
        sequences_per_example=2,
        compares_pairs=True,
        reads_reference=reads_reference,
        defaults={**defaults, **(_REFERENCE_DEFAULTS if reads_reference else {})},
    )


_REFERENCE_DEFAULTS: JsonObject = {"reference": None, "reference_model": None}
"""None is the recipe's own starting weights."""


OBJECTIVES: Mapping[str, ObjectiveTraits] = {
    NEXT_TOKEN: ObjectiveTraits(),
    "dpo": _pairs(reads_reference=True, beta=0.1, label_smoothing=0.0),
    "ipo": _pairs(reads_reference=True, beta=0.1, average=False),
    "simpo": _pairs(reads_reference=False, beta=2.0, gamma=1.0),
    "orpo": _pairs(reads_reference=False, beta=0.1),
    "kto": ObjectiveTraits(
        reads_labels=True,
        reads_reference=True,
        defaults={
            "beta": 0.1,
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
            **_REFERENCE_DEFAULTS,
        },
    ),
    "distill": ObjectiveTraits(
        reads_teacher=True, defaults={"teacher": None, "teacher_weight": 1.0}
    ),
    "reward": ObjectiveTraits(
        sequences_per_example=2,
        compares_pairs=True,
        scores_sequences=True,
        defaults={"center_coefficient": 0.0},
    ),
}
"""The defaults are those of the papers; models/tasks/preference.py and
parallel/distillation_loss.py have the formulas."""

METRICS = ("rewards_chosen", "rewards_rejected", "accuracy", "margin")
"""Means over a step's pairs: implicit rewards, or a reward model's own; the share in which the
chosen one's is higher, and by how much. Of labelled completions: the rewards of desirable and of
undesirable ones, the share whose reward is above 0 where it is desirable and not above where it is
not, and the difference of the two means."""

OBJECTIVE_KEYS = (
    *("beta", "gamma", "label_smoothing", "average"),
    *("desirable_weight", "undesirable_weight", "reference", "reference_model"),
    *("center_coefficient", "teacher", "teacher_weight"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSection:
    """Holds the objective and its keys; None for a key that the objective does not take.

    reference: the absolute folder of a model or of a score file; None is the recipe's own starting
    weights. reference_model: the folder of the model that a score file must be of. packed: derived
    from the data; pairs share sequences, which batch sizes count then.
    """

    name: str
    beta: float | None = None
    gamma: float | None = None
    label_smoothing: float | None = None
    average: bool | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reference: str | None = None
    reference_model: str | None = None
    teacher: str | None = None
    teacher_weight: float | None = None
    center_coefficient: float | None = None
    packed: bool | None = None

    @property
    def traits(self) -> ObjectiveTraits:
        return OBJECTIVES[self.name]


PLAIN_OBJECTIVE = ObjectiveSection(name=NEXT_TOKEN)


def objective_under_own_weights(section: JsonObject) -> JsonObject:
    """Return `training.objective` without another model or score file as its reference."""
    return {key: value for key, value in section.items() if key not in _REFERENCE_DEFAULTS}


def with_objective_defaults(document: JsonObject) -> JsonObject:
    """Fill in the keys of the chosen objective, and the task of a reward model, in a recipe as
    written."""
    training = document.get("training")
    section = training.get("objective") if isinstance(training, Mapping) else None
    name = section.get("name") if isinstance(section, Mapping) else None
    traits = OBJECTIVES.get(name) if isinstance(name, str) else None
    if traits is None or not isinstance(training, Mapping) or not isinstance(section, Mapping):
        return document
    given = {key: value for key, value in section.items() if value is not None}
    document = {**document, "training": {**training, "objective": {**traits.defaults, **given}}}
    model = document.get("model")
    if traits.scores_sequences and isinstance(model, Mapping):
        task = model.get("task")
        own = SCORING_TASK if task in (None, "auto") else task
        document = {**document, "model": {**model, "task": own}}
    return document


def without_null_objective_keys(training: JsonObject) -> JsonObject:
    """Drop the keys that are null: the objective does not take them, or does without them."""
    section = training["objective"]
    assert isinstance(section, Mapping)
    left = {key: value for key, value in section.items() if value is not None}
    return {**training, "objective": left}
