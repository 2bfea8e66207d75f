"""PyTorch Lightning: its Trainer drives our runs, and our model and data train under any Trainer.

`Module` and `DataModule` are for people who have a Trainer of their own. Neither is built before
it is asked for: Lightning takes seconds to import, and may not be there.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.lightning.data_module import DataModule
    from phalanx.lightning.module import Module

__all__ = ["DataModule", "Module"]


def __getattr__(name: str) -> Any:
    """One of the two classes, made for the Lightning package that this process uses."""
    if name == "Module":
        from phalanx.lightning.module import Module

        return Module
    if name == "DataModule":
        from phalanx.lightning.data_module import DataModule

        return DataModule
    raise AttributeError(f"module 'phalanx.lightning' has no attribute {name!r}")
