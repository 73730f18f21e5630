"""Models with dropout, and layouts that cut them over tensor ranks."""

from __future__ import annotations

from tests.parity.models import GPT2, OPT

MODELS = {"gpt2": {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}, "opt": OPT}
LAYOUTS = {"tp2-dp2": {"tensor": 2, "data": 2}, "pp2-tp2": {"tensor": 2, "pipeline": 2}}
