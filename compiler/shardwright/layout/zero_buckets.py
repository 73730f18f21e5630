"""What ZeRO communicates at once, in elements: DeepSpeed's own defaults, which the plan writes out
and the cost model counts with."""

from __future__ import annotations

BUCKET_NUMEL = 500_000_000
PREFETCH_NUMEL = 50_000_000
"""ZeRO-3 gathers parameters ahead up to so many; one that is larger comes whole, by itself."""
LIVE_NUMEL = 1_000_000_000
