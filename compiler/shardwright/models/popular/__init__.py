"""Hold the configurations of popular models, one JSON file a family (read by model_sources.py)."""
