"""A layout: the axes that split a run, a strategy along them, and what one is predicted to cost."""
