"""`doctor`: what would stop a run on its hosts, found before it starts."""
