"""A tiny model of a type that transformers lacks, as somebody would publish it: Python files beside
the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "tiny_of_its_own"

    def __init__(self, vocab_size=257, hidden_size=32, num_hidden_layers=4, scale=1.5, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.scale = scale
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
"""
LAYERS = '''
import torch
from torch import nn


class TinyLayer(nn.Module):
    """A running mean over earlier tokens instead of attention, then a feed-forward."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, hidden, counts):
        mixed = self.mix(self.norm(hidden)).cumsum(dim=1) / counts
        hidden = hidden + mixed
        return hidden + self.down(torch.tanh(self.up(hidden)))
'''
MODELING = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .configuration_tiny import TinyConfig
from .layers_tiny import TinyLayer


class TinyPreTrained(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"


class TinyModel(TinyPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TinyLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden * self.config.scale
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)[None, :, None]
        for layer in self.layers:
            hidden = layer(hidden, counts)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class TinyForCausalLM(TinyPreTrained, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, inputs_embeds=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)
"""  # noqa: E501
CONFIG: dict[str, Any] = {
    "model_type": "tiny_of_its_own",
    "auto_map": {
        "AutoConfig": "configuration_tiny.TinyConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
    },
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "scale": 1.7,
}
FILES = {
    "configuration_tiny.py": CONFIGURATION,
    "layers_tiny.py": LAYERS,
    "modeling_tiny.py": MODELING,
}


def write_own_model(folder: Path, **changes: Any) -> Path:
    """config.json and the three Python files; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder
