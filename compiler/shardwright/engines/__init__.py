"""What runs a plan. One folder an engine."""
