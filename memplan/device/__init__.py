"""GPUs and everything in their memory besides tensors: contexts, libraries' workspaces, what was measured of them."""
