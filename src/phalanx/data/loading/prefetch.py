"""Reading one step ahead, in a thread: on a CPU, data is made while torch is busy elsewhere."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_END = object()


def read_ahead(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    """The same items in the same order, each made while the one before is being used."""
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        coming = thread.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, items, _END)
            yield item  # type: ignore[misc]
