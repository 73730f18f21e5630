"""Train a compiled folder on its ranks: the loop, the session under it, and its records."""
