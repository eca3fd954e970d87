"""How many objects of SPMD mode's own a process holds, wherever it holds them."""

from __future__ import annotations

import gc
from collections import Counter

__all__ = ["ENGINES_CLASSES", "living", "resident_bytes"]

ENGINES_CLASSES = ("Spec", "Entry", "Program", "Instruction", "LinkedProgram", "Meta", "Layout", "OpSchema")
"""Classes whose objects are made for new shapes, on the driver, on workers, or by PyTorch for the driver."""

_MODULES = ("spmd.", "torch.distributed.tensor.")
"""Where these classes are defined. Others have classes of the same names: ``dis.Instruction``."""


def living() -> Counter[str]:
    """Numbers of living objects by class, of those classes alone."""
    gc.collect()
    classes = Counter(map(type, gc.get_objects()))
    counted: Counter[str] = Counter()
    for each, number in classes.items():
        if str(each.__module__).startswith(_MODULES):
            counted[each.__name__] += number
    return Counter({name: counted[name] for name in ENGINES_CLASSES})


def resident_bytes() -> int:
    """Memory of this process that is in use, as the kernel counts it."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
