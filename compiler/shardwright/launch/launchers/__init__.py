"""Hold the launchers: how each one starts the ranks, and which launch files it needs."""
