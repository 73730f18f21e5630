"""A Hugging Face model made ready to be split and trained, whatever the engine."""
