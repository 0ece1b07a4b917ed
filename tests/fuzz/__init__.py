"""Random input for whatever reads a user's text. Every case must end, within seconds and megabytes, as a result or as
an error of one line (``PlanError``, ``LackingError``), with nothing run.

A target (``targets.py``) makes cases and runs one; the driver watches it. Some seconds of every target are part of the
tests; more on request.
"""
