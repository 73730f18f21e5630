"""Render a compiled folder and its run as one HTML page: `shardwright report DIR`."""
