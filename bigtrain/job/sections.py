"""The base class of the sections of a job, and the check of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator


def refuse_truth(kind: object, value: object, metadata: Sequence[object] = ()) -> object:
    """Return a value, and refuse booleans and integers beyond 64 bits where a number is needed.

    pydantic would accept `true` as 1, and integers that torch's integers or a float cannot hold.

    Args:
        kind: the annotation of the key; an annotation with its own check is left to that check.
        value: the value of the key.
        metadata: pydantic's metadata of the field.

    Raises:
        ValueError: the value, or an item of it, is a boolean or an integer that is too large.
    """
    if any(isinstance(item, BeforeValidator) for item in metadata):
        return value
    kinds = _plain_kinds(kind)
    items = [value, *(value if isinstance(value, list | tuple) else ())]
    if not kinds & {int, float} or kinds & _ANYTHING:
        return value
    if any(isinstance(item, bool) for item in items):
        shown = str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f"needs a number (got {shown})")
    if any(isinstance(item, int) and abs(item) > MOST_WHOLE for item in items):
        raise ValueError(f"a whole number is at most {MOST_WHOLE:,}, and this one is larger")
    return value


MOST_WHOLE = 2**63 - 1
"""The largest whole number of a key: the largest of torch's 64-bit integers."""


_ANYTHING: set[object] = {bool, Any, object}


def _plain_kinds(kind: object) -> set[object]:
    """Return the types in an annotation, including those inside unions and lists."""
    inner = get_args(kind)
    if any(isinstance(annotation, BeforeValidator) for annotation in inner):
        return {Any}
    if get_origin(kind) in (dict, Literal):
        return set()
    return set().union(*map(_plain_kinds, inner)) if inner else {kind}


class ConfigSection(BaseModel):
    """The base class of sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        return refuse_truth(field.annotation, value, field.metadata)
