"""SW6xxx: one line a code, what is wrong in general."""

RUN_CODES: dict[str, str] = {
    "SW6001": "not a compiled folder, or one that another version wrote",
    "SW6002": "the installed packages are outside the range that the plan was made for",
    "SW6003": "the cluster at hand is not the one that the plan was made for",
    "SW6004": "the plan cannot run on this kind of machine",
    "SW6005": "the deepspeed launcher cannot be started",
    "SW6006": "another run of this folder is alive",
    "SW6007": "the pretrained weights are not where the plan says",
    "SW6008": "the model's own code is not what was compiled",
    "SW6101": "no text to train on",
    "SW6102": "an array of tokens that cannot be read",
    "SW6103": "tokens of the wrong shape or type",
    "SW6104": "less data than one global batch",
    "SW6105": "a token id outside the model's vocabulary",
    "SW6201": "a checkpoint that does not exist or is not whole",
    "SW6202": "a checkpoint of another layout",
    "SW6203": "a checkpoint of another model",
    "SW6301": "training started and did not finish",
    "SW6302": "a rank cannot reach rank 0",
    "SW6303": "a run does not move",
    "SW6401": "export cannot write its folder",
}
