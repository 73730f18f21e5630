"""Old names: this package was split into rooms. They stay for one version."""
