"""Restart a run that ended early: `run --supervise`."""
