"""The plan: its values, defaults and checks, and how a file or flags become one."""
