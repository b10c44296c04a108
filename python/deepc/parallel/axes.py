"""The process groups of a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..plan.mesh import Mesh

T = TypeVar("T")
_opened: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def axis_group(mesh: Mesh, axis: str, of: Callable[[Any], T], backend: str = "deepc") -> T:
    """of(the process group of this rank along an axis of the mesh), made once for a default group, an axis and what
    ranks it joins. Collective over all ranks."""
    groups = mesh.groups(axis)
    made = _opened.setdefault(dist.group.WORLD, {})
    if (key := (axis, groups)) not in made:
        me = dist.get_rank()
        for ranks in groups:
            opened = dist.new_group(list(ranks), backend=backend)
            if me in ranks:
                made[key] = of(opened)
    found: T = made[key]
    return found
