"""A run on its ranks: the loop, the session under it, and what it records."""
