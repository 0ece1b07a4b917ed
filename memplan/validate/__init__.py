"""``memplan validate``: the plan, run for real, measured beside estimated.

Whatever runs (``worker``) imports torch; what starts it, reads it and keeps it does not.
"""
