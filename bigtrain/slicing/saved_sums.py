"""Sums over the ranks that a block keeps for its second computation, in place of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class KeptSums:
    """The sums of products that are kept and not computed again: of them their parts are let go.

    Args:
        is_kept: whether the storage with a number (`_cdata`) is that of a product that is kept.
        keep: told the number of a sum's, which is kept in its place.
    """

    def __init__(self, is_kept: Callable[[int], bool], keep: Callable[[int], None]) -> None:
        self._is_kept, self._keep = is_kept, keep
        self._sums: dict[int, Tensor] = {}
        """By the storage of their parts, which is empty from then on."""

    @contextmanager
    def known(self) -> Iterator[None]:
        """Inside of a `with` block, the first time and again, sums are looked up here."""
        token = KEPT_SUMS.set(self)
        try:
            yield
        finally:
            KEPT_SUMS.reset(token)

    def sum_of(self, partial: Tensor, add_up: Callable[[], Tensor]) -> Tensor:
        """What `add_up` makes of this rank's part, or made of it the first time."""
        storage = partial.untyped_storage()
        known = self._sums.pop(storage._cdata, None)
        if known is not None:
            return known
        result = add_up()
        if self._is_kept(storage._cdata):
            self._sums[storage._cdata] = result.detach()
            self._keep(result.untyped_storage()._cdata)
            storage.resize_(0)
        return result


KEPT_SUMS: ContextVar[KeptSums | None] = ContextVar("kept_sums", default=None)
"""Where sums are looked up now; None where none is kept."""
