"""What ``import memplan`` offers: the command line's answers as values.

Functions here read what commands read, by the same code, and refuse what commands refuse (``PlanError``,
``LackingError``). A plan is given as a path, a built-in example's name, a mapping, a ``Plan``, or by fields alone::

    estimate("plan.yaml", mbs=2)
    estimate({"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "framework": "fsdp"})
    estimate(model="llama-3-8b", gpus=8, gpu="h100", framework="fsdp")

Fields are named as the command line's flags are, with ``_`` for ``-``, and stand over what the plan says, as flags do.
An answer has ``to_dict()``, which is the command's JSON; it prints with rich, and shows as HTML in a notebook.
"""
