"""What an estimate looks like: tables, comparisons, a stage's tape, JSON, a picture.

Everything here reads ``memplan.result`` and prints; nothing computes memory. This file imports
nothing, so that ``--json`` never pays for rich::

    from memplan.report.estimate import print_estimate
    from memplan.report.stages import print_comparison
    from memplan.report.detail import print_detail
    from memplan.report.json import comparison_to_json, to_json
"""
