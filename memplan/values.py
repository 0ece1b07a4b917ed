"""``dataclass``, as the standard library's, for classes that cost nothing until they are used.

The standard library compiles six methods for each class when it is imported, half a millisecond; a start imports more
than a hundred such classes, makes values of half of them, and a few of most. Here a method is compiled, from the same
text, when it is first called, and ``__init__`` when it was called a few times. Everything else (fields, slots,
``asdict``) is the standard library's own. ``NamedTuple`` leaves annotations as they are, each of which the standard
library compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


class HashedOnce:
    """Base of frozen values that keep their hash: of many fields, and looked up in caches again and again."""

    __slots__ = ("_hash",)


if TYPE_CHECKING:
    from dataclasses import dataclass, replace
    from re import compile as pattern
    from typing import NamedTuple
else:
    import dataclasses
    import re
    from collections import namedtuple
    from dataclasses import MISSING, FrozenInstanceError
    from functools import cache
    from operator import attrgetter
    from reprlib import recursive_repr
    from types import MemberDescriptorType

    class pattern:  # noqa: N801 (as ``re.compile``)
        """``re.compile``, for a pattern that costs nothing until it is used; by its methods, without its attributes."""

        def __init__(self, text):
            self._text = text

        def __getattr__(self, name):
            method = self.__dict__[name] = getattr(re.compile(self._text), name)
            return method

    class _Named(type):
        """Makes of a class's fields, defaults and methods what ``collections.namedtuple`` does of names."""

        def __new__(cls, name, bases, content):
            if not bases:
                return super().__new__(cls, name, bases, content)
            annotations = content.pop("__annotations__", None)
            if annotations is None:  # Python 3.14 evaluates them when they are asked for
                raise TypeError(f"{name} is made where annotations are no text (from __future__ import annotations)")
            defaults = [content.pop(field) for field in annotations if field in content]
            made = namedtuple(name, annotations, defaults=defaults, module=content["__module__"])
            made.__annotations__ = annotations
            for key, value in content.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Named):
        """``typing.NamedTuple``, with annotations that nobody has looked at."""

    def dataclass(cls=None, /, *, eq=True, frozen=False, slots=False):
        """``dataclasses.dataclass`` with those of its choices that are used here."""

        def made(cls):
            return _dataclass(cls, eq, frozen, slots)

        return made if cls is None else made(cls)

    def replace(one, /, **changes):
        """``dataclasses.replace``, in a tenth of the time."""
        positional, places, named, read = _read(type(one))
        values = [*read(one)]
        for name, value in changes.items():
            values[places[name]] = value
        return type(one)(*values[:positional], **dict(zip(named, values[positional:-1], strict=True)))

    @cache
    def _read(cls):
        """Of the fields that ``__init__`` takes: how many are positional, the places of all, the names of the others,
        and what reads them."""
        taken = [field for field in dataclasses.fields(cls) if field.init]
        named = [field.name for field in taken if field.kw_only]
        names = [field.name for field in taken if not field.kw_only] + named
        places = {name: at for at, name in enumerate(names)}
        return len(names) - len(named), places, named, attrgetter(*names, "__class__")

    def _dataclass(cls, eq, frozen, slots):
        own = set(vars(cls))
        if not cls.__doc__:
            cls.__doc__ = cls.__name__  # or else the standard library looks for the signature
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
        methods = (
            {"__init__": _init(frozen)} | ({"__eq__": _eq} if eq else {}) | ({"__hash__": _hash} if frozen else {})
        )
        for name, text in methods.items():
            if name not in own and (eq or name != "__hash__"):
                setattr(cls, name, _later(cls, name, text))
        if eq and not frozen and "__hash__" not in own:
            cls.__hash__ = None
        if "__repr__" not in own:
            cls.__repr__ = _repr
        if frozen:
            cls.__setattr__, cls.__delattr__ = _no_setattr, _no_delattr
            if slots:
                cls.__getstate__, cls.__setstate__ = _getstate, _setstate
        return cls

    FEW = 16
    """Calls that take less time than a method's compiler."""

    def _later(cls, name, text):
        """A method that puts the one compiled from ``text`` in its place when it is called; ``__init__`` sets one field
        after the other a few times before."""
        few = iter(range(FEW if name == "__init__" else 0))

        def method(self, *positional, **named):
            if next(few, None) is not None and _set_each(cls, self, *positional, **named) is None:
                return None
            lines, known = text(cls)
            made = {}
            exec("\n".join(lines), known, made)
            compiled = made[name]
            compiled.__qualname__ = f"{cls.__qualname__}.{name}"
            setattr(cls, name, compiled)
            return compiled(self, *positional, **named)

        method.__name__ = name
        method.__qualname__ = f"{cls.__qualname__}.{name}"
        return method

    def _set_each(cls, self, /, *positional, **named):
        """What the compiled ``__init__`` does; ``MISSING`` where that would say what is wrong."""
        fields = dataclasses.fields(cls)
        places = (field.name for field in fields if field.init and not field.kw_only)
        given = dict(zip(places, positional, strict=False)) | named
        if len(given) < len(positional) + len(named):
            return MISSING
        for field in fields:
            value = given.pop(field.name, MISSING) if field.init else MISSING
            if value is MISSING:
                value = field.default if field.default_factory is MISSING else field.default_factory()
            if value is not MISSING:
                object.__setattr__(self, field.name, value)
            elif field.init:
                return MISSING
        return MISSING if given else self.__post_init__() if hasattr(cls, "__post_init__") else None

    def _init(frozen):
        """``def __init__`` with a parameter for each field, that sets them and calls ``__post_init__``."""

        def text(cls):
            known = {"_set": object.__setattr__, "_MISSING": MISSING}
            positional, named, body = [], [], []
            for field in dataclasses.fields(cls):
                name = field.name
                value = name
                if field.default_factory is not MISSING:
                    known[f"_make_{name}"] = field.default_factory
                    default = "=_MISSING"
                    value = f"_make_{name}() if {name} is _MISSING else {name}" if field.init else f"_make_{name}()"
                elif field.default is not MISSING:
                    known[f"_default_{name}"] = field.default
                    default = f"=_default_{name}"
                    value = name if field.init else f"_default_{name}"
                else:
                    default = ""
                    if not field.init:
                        continue
                if field.init:
                    (named if field.kw_only else positional).append(name + default)
                place = getattr(cls, name, None)
                if not frozen:
                    body.append(f" self.{name} = {value}")
                elif isinstance(place, MemberDescriptorType):
                    known[f"_set_{name}"] = place.__set__
                    body.append(f" _set_{name}(self, {value})")
                else:
                    body.append(f" _set(self, {name!r}, {value})")
            if hasattr(cls, "__post_init__"):
                body.append(" self.__post_init__()")
            parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
            return [f"def __init__({parameters}):", *(body or [" pass"])], known

        return text

    def _compared(cls, owner):
        return "(" + "".join(f"{owner}.{field.name}, " for field in dataclasses.fields(cls) if field.compare) + ")"

    def _eq(cls):
        return [
            "def __eq__(self, other):",
            " if other.__class__ is self.__class__:",
            f"  return {_compared(cls, 'self')} == {_compared(cls, 'other')}",
            " return NotImplemented",
        ], {}

    def _hash(cls):
        value = f"hash({_compared(cls, 'self')})"
        if not issubclass(cls, HashedOnce):
            return ["def __hash__(self):", f" return {value}"], {}
        return [
            "def __hash__(self):",
            " try:",
            "  return self._hash",
            " except AttributeError:",
            f"  found = {value}",
            "  _set(self, '_hash', found)",
            "  return found",
        ], {"_set": object.__setattr__}

    @recursive_repr()
    def _repr(self):
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _no_setattr(self, name, value):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _no_delattr(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _getstate(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _setstate(self, state):
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)


__all__ = ["HashedOnce", "NamedTuple", "dataclass", "pattern", "replace"]
