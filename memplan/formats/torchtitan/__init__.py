"""torchtitan's job files: TOML, or the JSON that a job saves."""
