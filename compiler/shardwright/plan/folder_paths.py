"""Names of the files and folders in a compiled folder."""

from __future__ import annotations

PLAN_FILE = "plan.json"
MODEL_DIRECTORY = "model"
CONFIG_FILE = f"{MODEL_DIRECTORY}/config.json"
TOKENIZER_DIRECTORY = "tokenizer"
HOSTFILE = "launch/hostfile"
SPARE_HOSTS = "launch/spare_hosts"
SETUP_SCRIPT = "launch/setup.sh"
RUN_DIRECTORY = "run"
SCORE_FILE = "score.json"
"""Makes the ranks score the data instead of training: a folder of `shardwright score`."""
