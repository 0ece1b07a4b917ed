"""Places in a model whose modules are wrapped, and do things in hooks of their own: ``DTensor``'s, recompute's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from .places import Places

WRAPPED = "._checkpoint_wrapped_module"


class HookedPlaces(Places):
    """As ``Places``, but what a module's hooks do to its output belongs to the module, and wrappers have no
    name. To be made when all hooks are there. ``models``: the stages of one rank, whose layers have names
    of their own."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__(models[0])
        self.models = list(models)
        self.names, self.owners = {}, {}
        for model in models:
            for path, module in model.named_modules():
                name = path.replace(WRAPPED, "")
                self.names[id(module)] = name
                self.owners |= dict.fromkeys(map(id, module.parameters(recurse=False)), name)

    @contextmanager
    def followed(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self._enter)]
        for model in self.models:
            handles += [module.register_forward_hook(self._leave, always_call=True) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
