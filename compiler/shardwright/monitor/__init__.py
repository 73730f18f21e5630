"""Report what happens to a run's ranks: lost ranks, stalls, events, and the files of the run."""
