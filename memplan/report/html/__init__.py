"""``--html FILE``: an answer as one page that needs nothing else, no network among it.

Everything here reads answers and writes text. ``assets/`` has the page's own style and script, and uPlot
(https://github.com/leeoniya/uPlot, MIT, as published on npm; its first line names the version), which draws the charts.
"""
