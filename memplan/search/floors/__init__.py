"""What a layout needs at least where nobody chooses how its model is cut: a proven bound, without folding it.

See ``floor`` for the argument, and one file for each way to keep states: ``whole``, ``zero``, ``sharded``, ``staged``.
"""

from .floor import Floors

__all__ = ["Floors"]
