"""Find the inputs that a model needs for windows of tokens. Refuse models that lack support."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from bigtrain.data.tokens.windows import Masks
from bigtrain.errors import ConfigError

_WHOLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
_NO_PACKING = "Set data.args.packing=false"


def masks_for(
    model: nn.Module, *, packs: bool, length: int, tokens: int
) -> tuple[Masks, int | None]:
    """Return the form of a model's inputs, and the sliding window that its mask must have.

    A causal model gets no mask of padding: padding is on the right, so no token of a document
    attends to it. Without a mask, attention needs no seq x seq bytes for it and may use fused
    kernels.

    Args:
        model: the model, whose forward takes the tokens; its parameters need no values.
        packs: whether windows have several documents.
        length: number of tokens in a window.
        tokens: number of tokens in the tokenizer's vocabulary.

    Returns:
        The form of the inputs, and the sliding window in tokens; None for no sliding window.

    Raises:
        ConfigError: the vocabulary or the window is too large for the model, or the model does not
            support a mask of documents.
    """
    _check_sizes(model, length, tokens)
    taken = _taken(model)
    if not packs:
        needs_mask = "attention_mask" in taken and not _is_causal(model)
        return "padding" if needs_mask else "none", None
    missing = [name for name in ("attention_mask", "position_ids") if name not in taken]
    if missing:
        raise ConfigError(
            f"data.args.packing=true puts several documents in a window, and the forward of "
            f"{type(model).__name__} does not take {' and '.join(missing)}, which keep them "
            f"apart. {_NO_PACKING}."
        )
    return "documents", _sliding_window(model, length)


def tokens_name(model: nn.Module) -> str:
    """Return the parameter of `forward` that takes the tokens: `input_ids`, or else the first."""
    taken = _taken(model)
    return "input_ids" if "input_ids" in taken or not taken else taken[0]


def _taken(model: nn.Module) -> list[str]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _is_causal(model: nn.Module) -> bool:
    """Whether `is_causal` is true of all modules that have it, as attention of transformers has."""
    flags = [bool(m.is_causal) for m in model.modules() if hasattr(m, "is_causal")]
    return bool(flags) and all(flags)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", None) or config


def _check_sizes(model: nn.Module, length: int, tokens: int) -> None:
    """Refuse more tokens than the embedding has rows, and a window longer than the positions.

    Raises:
        ConfigError: one of these; the message has both numbers.
    """
    config = _text_config(model)
    rows = _vocabulary(model, config)
    if rows is not None and tokens > rows:
        raise ConfigError(
            f"data.args.tokenizer: it has {tokens:,} tokens, and {type(model).__name__} has "
            f"{rows:,}. Use the model's own tokenizer, or a model with a larger vocabulary."
        )
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and length > most > 0:
        raise ConfigError(
            f"data.args.sequence_length={length} is more than the {most} positions of "
            f"{type(model).__name__}. Set data.args.sequence_length={most} or less."
        )


def _vocabulary(model: nn.Module, config: Any) -> int | None:
    """Return the rows of the model's embedding of tokens; None if they are not known."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    rows = getattr(config, "vocab_size", None)
    return rows if isinstance(rows, int) else None


def _sliding_window(model: nn.Module, length: int) -> int | None:
    """Return the window of a model's sliding attention, if it is shorter than `length`.

    A mask that is passed to a model of transformers replaces the mask that the model would make, so
    it has to apply the model's sliding window as well. Other models are not checked.

    Raises:
        ConfigError: a layer is not causal attention, layers need different masks, or the attention
            does not take masks of bool.
    """
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return None  # a user's model is expected to use the mask as documented
    name, config = type(model).__name__, _text_config(model)
    kind = getattr(config, "_attn_implementation", None)
    if kind != "sdpa":
        raise ConfigError(
            f"data.args.packing=true gives a mask of bool, which {name} takes with the attention "
            f"'sdpa', and it has {kind!r}. Set its attn_implementation to sdpa, or "
            "data.args.packing=false."
        )
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    layers = set(layers or ())
    keeps_state = getattr(model, "_is_stateful", False) or layers - _WHOLE_LAYERS
    if keeps_state or not _is_causal(model):
        what = ", ".join(sorted(layers - _WHOLE_LAYERS)) or "layers that are no causal attention"
        raise ConfigError(
            f"data.args.packing=true: {name} has {what}, which would carry one document into the "
            f"next. {_NO_PACKING}."
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layers if layers else window is not None
    if not slides or not isinstance(window, int) or window >= length:
        return None
    if layers - {"sliding_attention"}:
        raise ConfigError(
            f"data.args.packing=true gives all layers one mask, and those of {name} need two: its "
            f"sliding window of {window} tokens is shorter than the {length} of a sample. Set "
            f"data.args.sequence_length={window} or data.args.packing=false."
        )
    return window
