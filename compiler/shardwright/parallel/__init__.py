"""Prepare a Hugging Face model for sharded training, whatever the engine."""
