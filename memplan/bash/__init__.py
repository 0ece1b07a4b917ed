"""A launch script followed as its shell would, with nothing run."""
