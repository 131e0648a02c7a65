"""Create classes that combine a mixin of Fathom with a family's class, and whose objects can be copied and pickled."""

from __future__ import annotations

from functools import cache
from typing import Any


class Made:
    """Base class of mixins for families' classes; the combined classes are pickled by recreating them."""

    recipe: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, self.recipe, self.__dict__


@cache
def mixed(ours: Any, theirs: Any, name: str) -> type:
    """A subclass of both."""
    return type(name, (ours, theirs), {"__module__": theirs.__module__, "recipe": (ours, theirs, name)})


def _empty(*recipe: Any) -> Any:
    made: Any = mixed(*recipe)
    return made.__new__(made)
