"""Define the engines that run a plan, one folder each."""
