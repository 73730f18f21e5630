"""What the ranks of a run tell each other and whoever watches: lost ranks, stalls, events, the
journal."""
