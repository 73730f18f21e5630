"""How the ranks are started: the launch files of each target."""
