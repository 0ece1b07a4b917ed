"""Sizes of memory as people write them: ``16GiB``, ``512 MiB``, ``24GB``, ``5%``."""

from __future__ import annotations

from ..values import pattern
from .errors import PlanError

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
ALLOWED = "must be bytes, or a size with a unit (KiB, MiB, GiB; kB, MB, GB for powers of ten)"
LEAST = 2**20
"""Bytes. A smaller number without a unit is a size in another unit, which nobody can know: ``80``."""
LARGEST = 2**50
"""Bytes: a pebibyte, more than any device has."""

_UNIT_OF = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = pattern(r"([0-9]{1,18}(?:\.[0-9]{0,18})?)\s*([a-zA-Z]{0,3}|%)")


def parse_size(text: str) -> int | None:
    """Bytes of ``2GiB``, ``24000 MB`` or ``1024``; ``None`` where that is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNIT_OF:
        return None
    number, unit = match[1], _UNIT_OF[match[2].lower()]
    if "." not in number:
        return int(number) * unit
    whole, _, fraction = number.partition(".")
    return int(whole) * unit + int(fraction or 0) * unit // int(10 ** len(fraction))


def headroom_bytes(headroom: str, capacity: int | None) -> int:
    """Bytes that ``plan.headroom`` keeps free of a device of ``capacity`` bytes; a percentage is of the capacity.

    Without a capacity there is nothing to keep free of, and a percentage is zero.
    """
    match = _SIZE.fullmatch(headroom.strip())
    if match is not None and match[2] == "%":
        percent = float(match[1])
        if percent >= 100:
            raise PlanError("headroom", headroom, "must be less than 100%")
        return int((capacity or 0) * percent / 100)
    size = parse_size(headroom)
    if size is None:
        raise PlanError("headroom", headroom, f"{ALLOWED}, or a percentage of the device's memory such as 5%")
    check_unit("headroom", headroom, size)
    if size > LARGEST:
        raise PlanError("headroom", headroom, "is more than any device has")
    return size


def default_reserve(capacity: int) -> str:
    """What a recommendation leaves free of ``capacity`` bytes where nobody says how much: 2 %, and 1 GiB at least, for
    what no plan says (other processes, longer sequences, another release of a library)."""
    return "2%" if capacity >= 50 * UNITS["GiB"] else "1GiB"


def check_unit(field: str, written: object, size: int) -> None:
    """Refuses the ``size`` of a ``field`` that was ``written`` without a unit and is less than anybody means."""
    if 0 < size < LEAST and (match := _SIZE.fullmatch(str(written).strip())) is not None and not match[2]:
        raise PlanError(field, written, f"needs a unit: {match[1]}GiB, or {match[1]}GB")
