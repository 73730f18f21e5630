"""Helpers that know nothing of training. They import diagnostics at most."""
