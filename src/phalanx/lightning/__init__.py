"""PyTorch Lightning: its Trainer drives our runs, and our model and data train under any Trainer.

`Module` and `DataModule` are for users with a Trainer of their own. Neither is created before it
is accessed: Lightning takes seconds to import, and may not be installed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.lightning.data_module import DataModule
    from phalanx.lightning.module import Module

__all__ = ["DataModule", "Module"]


def __getattr__(name: str) -> Any:
    """One of the two classes, derived from the Lightning package that this process uses."""
    if name == "Module":
        from phalanx.lightning.module import Module

        return Module
    if name == "DataModule":
        from phalanx.lightning.data_module import DataModule

        return DataModule
    raise AttributeError(f"module 'phalanx.lightning' has no attribute {name!r}")
