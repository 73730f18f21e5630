"""What a type needs beside the generic shrinker of configs.py: each entry says why. `...` removes a key."""

from __future__ import annotations

from typing import Any

Json = Any

IMPOSSIBLE: dict[str, str] = {}

OVERRIDES: dict[str, dict[str, Json]] = {}
