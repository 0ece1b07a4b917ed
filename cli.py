"""``python cli.py …`` is ``memplan …``, from a checkout that is not installed."""

from memplan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
