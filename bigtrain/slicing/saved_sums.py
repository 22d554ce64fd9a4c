"""Sums over the tp ranks that selective recomputation saves instead of the partial products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class SavedSums:
    """Saves the sum of a product over the ranks. The partial product is freed, not saved.

    Args:
        is_saved: whether a storage (by its `_cdata`) is that of a saved product.
        save: called with the storage (`_cdata`) of a sum, to save it instead.
    """

    def __init__(self, is_saved: Callable[[int], bool], save: Callable[[int], None]) -> None:
        self._is_saved, self._save = is_saved, save
        self._sums: dict[int, Tensor] = {}
        """The sums, by the storage (`_cdata`) of the partial product, which has been emptied."""

    @contextmanager
    def known(self) -> Iterator[None]:
        """Set `SAVED_SUMS` to this object in a `with` block, for a pass or its recomputation."""
        token = SAVED_SUMS.set(self)
        try:
            yield
        finally:
            SAVED_SUMS.reset(token)

    def sum_of(self, partial: Tensor, add_up: Callable[[], Tensor]) -> Tensor:
        """Return the sum that the first forward pass has saved, or else the result of `add_up`."""
        storage = partial.untyped_storage()
        known = self._sums.pop(storage._cdata, None)
        if known is not None:
            return known
        result = add_up()
        if self._is_saved(storage._cdata):
            self._sums[storage._cdata] = result.detach()
            self._save(result.untyped_storage()._cdata)
            storage.resize_(0)
        return result

    def forget(self, partials: set[int]) -> set[int]:
        """Free the sums of partial products, and return the ids of the sums' storages.

        Args:
            partials: the storages (`_cdata`) of the partial products.
        """
        sums = [self._sums.pop(partial) for partial in partials if partial in self._sums]
        return {result.untyped_storage()._cdata for result in sums}


SAVED_SUMS: ContextVar[SavedSums | None] = ContextVar("saved_sums", default=None)
"""The object in which sums are looked up; None outside of recomputed blocks."""
