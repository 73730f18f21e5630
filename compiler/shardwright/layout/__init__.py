"""Describe layouts: the axes that split a run, a layout along them, and its predicted cost."""
