"""Python that builds a configuration of dataclasses, followed without being run."""
