"""The safety net: digests of complete answers of some 450 plans and 20 searches, with summaries that people can read.

    python -m tests.golden                     checks all (``make golden``); a pattern checks a part
    python -m tests.golden --record            records texts that changed, and new cases
    python -m tests.golden --record-figures    records figures, too: only in a commit that names them

``cases.py`` lists the command lines, ``answers.py`` turns each into digests, ``recorded.jsonl`` keeps them.
"""
