"""The store that adds islands' deltas up, and a rank's way to it. No torch here."""
