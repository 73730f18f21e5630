"""Starting a run, from the host that one types `run` on, and looking after it there."""
