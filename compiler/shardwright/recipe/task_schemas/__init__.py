"""The published JSON schemas of the task files of SkyPilot and dstack."""
