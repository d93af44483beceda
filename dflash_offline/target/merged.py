"""One product for projections that read the same input: query, key and value; gate and up.

A product of a narrow matrix leaves the last round of a GPU's tiles half empty. So the weights of such projections are laid one
under another in one matrix, of which the modules' own weights are views: nothing is held twice, and a module that is
called by itself computes as before. Only compiled code computes them together: the first of the projections called gives
the others theirs, when they are given the very same input. Uncompiled code, the self-check's plain forward
among it, goes on one by one.

Which modules these are is seen, not supposed: each must have been called once with the same tensor in a forward that was watched.

Tensor legend: I channels in.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Group:
    """Projections whose weights lie in one matrix.

    While the projections of one module are being traced, ``_given`` is what the first was given, ``_parts`` what each may
    take and ``_taken`` which did; all is gone when the last one has.
    """

    def __init__(self, modules: list[nn.Linear]) -> None:
        self.sizes = [module.out_features for module in modules]
        # parameters, because torch.compile takes their sizes for constants
        self.weight = _under_one_another([module.weight for module in modules])
        self.bias = None if modules[0].bias is None else _under_one_another([module.bias for module in modules])
        self._given: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._taken: tuple[int, ...] = ()
        for name, whole in (("weight", self.weight), ("bias", self.bias)):
            if whole is not None:
                for module, rows in zip(modules, whole.detach().split(self.sizes), strict=True):
                    setattr(module, name, nn.Parameter(rows, requires_grad=False))
        for place, module in enumerate(modules):
            module.__class__ = _MergedLinear
            module.group, module.place = self, place

    def take(self, place: int, states: Tensor) -> Tensor | None:
        """Projection ``place`` of ``states`` [..., I], a view; None if it has to compute it itself."""
        if self._given is None or place in self._taken:  # the module is called anew
            self._parts = torch.nn.functional.linear(states, self.weight, self.bias).split(self.sizes, -1)
            self._given, self._taken = states, ()
        part = self._parts[place] if self._given is states else None
        self._taken += (place,)
        if len(self._taken) == len(self.sizes):
            self._given, self._parts, self._taken = None, (), ()
        return part


class _MergedLinear(nn.Linear):
    """A projection of a group. Its weight and bias are its own rows of the group's."""

    group: _Group
    place: int

    def forward(self, states: Tensor) -> Tensor:
        part = self.group.take(self.place, states) if torch.compiler.is_compiling() else None
        return super().forward(states) if part is None else part


def _under_one_another(parameters: list[nn.Parameter]) -> nn.Parameter:
    return nn.Parameter(torch.cat([parameter.detach() for parameter in parameters]), requires_grad=False)


def merge(modules: Iterable[nn.Module], run: Callable[[], object]) -> int:
    """Lay the projections below these modules into one matrix each, where that changes nothing but the speed.

    Left as they are: projections that are no plain ``nn.Linear`` (quantised, adapted, with hooks), that share a weight with
    one another, and all of them where GPU memory is tight: the weights move, and what they leave may stay unused in between.

    Args:
        modules: decoder layers.
        run: a forward of the whole model, on anything, uncompiled; where it fails nothing is merged.

    Returns:
        How many groups were merged.
    """
    candidates = [group for layer in modules for owner in layer.modules() for group in _candidates(owner)]
    uses = Counter(module.weight.data_ptr() for group in candidates for module in group)
    candidates = [group for group in candidates if all(uses[module.weight.data_ptr()] == 1 for module in group)]
    candidates = _same_input(candidates, run) if candidates else []
    if not candidates or not _has_room(candidates):
        return 0
    for group in candidates:
        _Group(group)
    if candidates[0][0].weight.is_cuda:
        torch.cuda.empty_cache()
    return len(candidates)


def value_row(modules: Iterable[nn.Module]) -> int | None:
    """Channels from one token's values to the next one's in compiled attention; None where values lie by themselves."""
    for layer in modules:
        for name, module in layer.named_modules():
            if name.endswith("v_proj") and isinstance(module, _MergedLinear):
                return sum(module.group.sizes)
    return None


def _candidates(owner: nn.Module) -> list[list[nn.Linear]]:
    """Groups of plain projections, by their names, directly below a module."""
    found = []
    for names in _GROUPS:
        group = [getattr(owner, name, None) for name in names]
        if all(map(_is_plain, group)) and len({(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in group}) == 1:
            found.append(group)
    return found


def _is_plain(module: object) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _same_input(candidates: list[list[nn.Linear]], run: Callable[[], object]) -> list[list[nn.Linear]]:
    """The groups whose projections each ran once, all with one and the same tensor, which was not written to in between."""
    given: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {module: [] for group in candidates for module in group}
    hooks = [module.register_forward_pre_hook(lambda module, args: given[module].append((args[0], args[0].clone()))) for module in given]
    try:
        run()
    except Exception:  # a model that cannot take these tokens, or too little memory: what is wrong with it is not said here
        return []
    finally:
        for hook in hooks:
            hook.remove()

    def alike(calls: list[list[tuple[Tensor, Tensor]]]) -> bool:
        if any(len(each) != 1 for each in calls):
            return False
        (first, content), *others = (each[0] for each in calls)
        return all(tensor is first and torch.equal(was, content) for tensor, was in others)

    return [group for group in candidates if alike([given[module] for module in group])]


def _has_room(candidates: list[list[nn.Linear]]) -> bool:
    moved: Counter[torch.device] = Counter()
    for group in candidates:
        moved[group[0].weight.device] += sum(module.weight.nbytes for module in group)
    free = {device: torch.cuda.mem_get_info(device) for device in moved if device.type == "cuda"}
    return all(left - moved[device] > total // 8 for device, (left, total) in free.items())
