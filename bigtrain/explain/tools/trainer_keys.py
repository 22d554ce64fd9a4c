"""Read the parts that files of Accelerate, axolotl and TRL share: FSDP, adapters, optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.explain.request import Asked, FileSection, ToolRequest, WrittenKey

SHARDING = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "fsdp_zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid",
}
"""bigtrain's preset for each sharding strategy of FSDP 1.

`hybrid` becomes a preset with a number when the ranks of a node are known.
"""
_BY_NUMBER = {str(number): name for number, name in enumerate(SHARDING, start=1)}
FSDP_OUTSIDE = (
    *("state_dict_type", "final_state_dict_type", "cpu_ram_efficient_loading"),
    *("cpu_offload_pin_memory", "limit_all_gathers", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
)
"""Options of FSDP, without their prefix, that change neither memory nor seconds of a step."""
FSDP_1_ONLY = ("sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch")
FSDP_READ = (
    *("version", "reshard_after_forward", "offload_params", "cpu_offload", "forward_prefetch"),
    *("activation_checkpointing", "activation_checkpointing_offload", "auto_wrap_policy"),
    *("transformer_layer_cls_to_wrap", "min_num_params", "mixed_precision_policy"),
)
FSDP_NOT_FORECAST = {
    "ignored_modules": "modules that are not sharded have no counterpart; all are forecast sharded",
    "xla_fsdp_settings": "TPUs have no counterpart",
}
_FSDP_DEFAULTS = {
    **{"offload_params": False, "activation_checkpointing": False, "forward_prefetch": False},
    **{"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True},
}
"""Accelerate's defaults of options."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_hf", "adamw_torch_fused", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **{"paged_adamw_8bit": "adamw_8bit", "adamw_torch_4bit": "adamw_4bit", "paged_adamw": "adamw"},
    **{"adafactor": "adafactor", "sgd": "sgd"},
}
"""bigtrain's optimizer for each name of transformers."""
_FOREACH = ("adamw_torch", "adamw_hf")
"""Optimizers for which torch updates all parameters at once, with temporary copies."""
SCHEDULE_NAMES = {
    **{"cosine": "cosine", "linear": "linear", "constant": "constant", "polynomial": "poly"},
    "constant_with_warmup": "constant",
}


class FsdpOptions:
    """The options of FSDP, written with the prefix `fsdp_` or without."""

    def __init__(self, section: FileSection) -> None:
        self.section = section

    def key(self, name: str) -> str:
        """Return the name with which an option is written; if it is not written, without prefix."""
        prefixed = f"fsdp_{name}"
        return prefixed if self.section.get(prefixed) is not None else name

    def get(self, name: str) -> Any:
        """Return the value of an option; None if it is not set."""
        return self.section.get(self.key(name))

    def is_on(self, name: str) -> bool:
        """Whether an option is on; see `FileSection.is_on`."""
        return self.section.is_on(self.key(name))

    def written(self, *names: str) -> list[WrittenKey]:
        """Return those of the options that are written."""
        return self.section.written(*map(self.key, names))


def read_fsdp(
    request: ToolRequest, section: FileSection, version: int, extra: tuple[WrittenKey, ...] = ()
) -> None:
    """Add the settings of a section of FSDP options.

    Args:
        request: gets the strategy, other settings and findings.
        section: the options.
        version: the version of FSDP, 1 or 2, if the section does not set it.
        extra: the keys that switch FSDP on.

    Raises:
        ConfigError: the sharding strategy is unknown.
    """
    options = FsdpOptions(section)
    said = options.get("version")
    version = int(said) if str(said) in ("1", "2") else version
    _report_twice(request, options)
    if version == 1:
        _read_fsdp_1(request, options, extra)
    else:
        _read_fsdp_2(request, options, extra)
    moved = options.written("offload_params", "cpu_offload")
    if options.is_on("offload_params") or options.is_on("cpu_offload"):
        for word in ("offload_cpu", "offload_parameters_cpu"):
            request.added[word] = Asked(word, tuple(moved))
    if options.is_on("activation_checkpointing"):
        request.added["full"] = Asked("full", tuple(options.written("activation_checkpointing")))
    if options.is_on("activation_checkpointing_offload"):
        written = options.written("activation_checkpointing_offload")
        request.added["offload_activations_cpu"] = Asked("offload_activations_cpu", tuple(written))
    _read_wrapping(request, options)
    _sort_fsdp(request, options)


def _report_twice(request: ToolRequest, options: FsdpOptions) -> None:
    """Report options that are written both with the prefix and without it."""
    for key in options.section.values:
        name = str(key).removeprefix("fsdp_")
        both = options.section.written(f"fsdp_{name}", name)
        if key != name and len(both) == 2:
            same = both[0].value == both[1].value
            request.find(
                "no effect" if same else "contradiction",
                both,
                "it is the same option twice" if same else "it is one option with two values",
                f"Leave one of them out, best {both[0].key}.",
            )


def _read_fsdp_1(request: ToolRequest, options: FsdpOptions, extra: tuple[WrittenKey, ...]) -> None:
    name = str(options.get("sharding_strategy") or options.get("reshard_after_forward") or "")
    if isinstance(options.get("reshard_after_forward"), bool):
        request.find(
            "contradiction",
            options.written("reshard_after_forward", "version"),
            "true and false are for FSDP 2, and FSDP 1 refuses them",
            "Write fsdp_version: 2.",
        )
        resharded = options.is_on("reshard_after_forward")
        name = str(options.get("sharding_strategy") or ("" if resharded else "SHARD_GRAD_OP"))
    name = _BY_NUMBER.get(name, name).upper() or "FULL_SHARD"
    written = options.written("sharding_strategy") or [*extra]
    if name not in SHARDING:
        place = options.section.place(options.key("sharding_strategy"))
        raise ConfigError(
            f"{place}: sharding_strategy={name} is none of FSDP's. Write one of "
            f"{', '.join(SHARDING)}."
        )
    request.strategy = Asked(SHARDING[name], tuple(written))
    if name == "HYBRID_SHARD_ZERO2":
        request.find(
            "not forecast",
            written,
            "groups of ranks that keep parameters gathered have no counterpart; it is forecast as "
            "HYBRID_SHARD",
            "Use --strategy hybrid.",
        )
    if options.is_on("cpu_ram_efficient_loading") and options.get("sync_module_states") is False:
        request.find(
            "contradiction",
            options.written("cpu_ram_efficient_loading", "sync_module_states"),
            "only rank 0 would get the weights, and Accelerate refuses it",
            "Write fsdp_sync_module_states: true.",
        )


def _read_fsdp_2(request: ToolRequest, options: FsdpOptions, extra: tuple[WrittenKey, ...]) -> None:
    gathered = options.get("reshard_after_forward") is not None and not options.is_on(
        "reshard_after_forward"
    )
    written = options.written("reshard_after_forward", "version") or [*extra]
    request.strategy = Asked("fsdp_zero2" if gathered else "fsdp", tuple(written))
    if options.is_on("forward_prefetch"):
        request.find(
            "contradiction",
            options.written("forward_prefetch", "version"),
            "FSDP 2 has no such option, and Accelerate refuses it",
            "Leave fsdp_forward_prefetch out.",
        )
    for name in FSDP_1_ONLY:
        instead = "fsdp_reshard_after_forward decides it" if name == "sharding_strategy" else ""
        request.find(
            "no effect",
            options.written(name),
            f"it is for FSDP 1{'; ' if instead else ''}{instead}",
            "Leave it out.",
        )


def _read_wrapping(request: ToolRequest, options: FsdpOptions) -> None:
    policy = str(options.get("auto_wrap_policy") or "TRANSFORMER_BASED_WRAP").upper()
    classes = options.get("transformer_layer_cls_to_wrap")
    if policy == "NO_WRAP":
        request.find(
            "not forecast",
            options.written("auto_wrap_policy"),
            "the whole model is gathered at once, which saves little; it is forecast with each "
            "layer gathered alone",
            "Write TRANSFORMER_BASED_WRAP.",
        )
    elif policy == "SIZE_BASED_WRAP":
        request.find(
            "not forecast",
            options.written("auto_wrap_policy", "min_num_params"),
            "modules are gathered by their size; it is forecast with each layer gathered alone",
            "Write TRANSFORMER_BASED_WRAP.",
        )
    if classes is not None and policy != "TRANSFORMER_BASED_WRAP":
        request.find(
            "no effect",
            options.written("transformer_layer_cls_to_wrap"),
            f"it is for TRANSFORMER_BASED_WRAP, and the policy is {policy}",
            "Leave it out.",
        )
    elif classes is not None:
        names = classes if isinstance(classes, list) else str(classes).split(",")
        written = tuple(options.written("transformer_layer_cls_to_wrap"))
        request.layer_classes = Asked([str(name).strip() for name in names], written)
    if policy != "SIZE_BASED_WRAP":
        request.find(
            "no effect",
            [each for each in options.written("min_num_params") if each.value],
            f"it is for SIZE_BASED_WRAP, and the policy is {policy}",
            "Leave it out.",
        )


def _sort_fsdp(request: ToolRequest, options: FsdpOptions) -> None:
    """Report the options that nothing has read, and options that repeat a default."""
    above = options.section.written(*options.section.values)
    names = {str(key).removeprefix("fsdp_"): str(key) for key in options.section.values}
    prefix = {each.key.rpartition(".")[2]: each.key for each in above}
    same = [
        name
        for name, value in _FSDP_DEFAULTS.items()
        if options.get(name) == value and type(options.get(name)) is type(value)
    ]
    request.find(
        "no effect",
        options.written(*same),
        "it is what Accelerate does without it",
        "Leave it out, or keep it as a note.",
    )
    for name, key in names.items():
        if options.section.get(key) is None or name in (*FSDP_READ, *FSDP_1_ONLY):
            continue
        if name in FSDP_OUTSIDE:
            request.outside.append(prefix.get(key, key))
        else:
            reason = FSDP_NOT_FORECAST.get(name, "it is not an option of FSDP that is known here")
            request.find("not forecast", options.section.written(key), reason, "Check its name.")


@dataclass(frozen=True)
class AdapterKeys:
    """The names of a tool's keys for adapters, and its defaults; None means no default."""

    tool: str
    """The name of the tool or library whose defaults these are."""
    rank: str = "lora_r"
    alpha: str = "lora_alpha"
    dropout: str = "lora_dropout"
    targets: str = "lora_target_modules"
    saved: str = "lora_modules_to_save"
    rank_default: int | None = None
    alpha_default: float | None = None
    dropout_default: float = 0.0


def read_adapters(request: ToolRequest, section: FileSection, keys: AdapterKeys) -> None:
    """Add `model.lora` for a file that trains adapters.

    Args:
        request: gets the keys of `model.lora`.
        section: the file.
        keys: the names of the keys, and their defaults.

    Raises:
        ConfigError: a value is not a number, or the rank is missing and has no default.
    """
    rank = section.count(keys.rank)
    if rank is None and keys.rank_default is None:
        raise ConfigError(
            f"{section.file.path}: adapters are asked for, and {keys.rank} is not set. Write "
            f"{keys.rank}: 16."
        )
    request.keys["model.lora.rank"] = rank or _default(keys, keys.rank_default)
    alpha = section.number(keys.alpha)
    if alpha is not None or keys.alpha_default is not None:
        request.keys["model.lora.alpha"] = alpha or _default(keys, keys.alpha_default)
    dropout = section.number(keys.dropout)
    request.keys["model.lora.dropout"] = dropout or _default(keys, keys.dropout_default)
    targets = section.get(keys.targets)
    names = [targets] if isinstance(targets, str) else list(targets or [])
    if names:
        request.keys["model.lora.targets"] = section.asked(keys.targets, names)
    saved = section.get(keys.saved)
    if saved:
        names = [saved] if isinstance(saved, str) else list(saved)
        request.keys["model.lora.modules_to_save"] = section.asked(keys.saved, names)


def _default(keys: AdapterKeys, value: object) -> Asked:
    return Asked(value, why=f"the default of {keys.tool}")


def quantise(request: ToolRequest, written: list[WrittenKey]) -> None:
    """Store the frozen weights under adapters in 4 bits.

    Args:
        request: gets `model.lora.quantize`.
        written: the keys of the file that request it.
    """
    request.keys["model.lora.quantize"] = Asked("nf4", tuple(written))


def read_optimizer(request: ToolRequest, section: FileSection, key: str, fallback: str) -> None:
    """Add the optimizer, which the file names as in transformers.

    Args:
        request: gets `optim.name`, and findings.
        section: the file.
        key: the key of the optimizer.
        fallback: the tool's default.
    """
    written = section.written(key)
    name = str(section.get(key) or fallback).lower().removeprefix("optimizernames.")
    ours = OPTIMIZERS.get(name)
    if ours is None:
        request.find(
            "not forecast",
            written,
            "it has no counterpart; it is forecast as adamw",
            "Use adamw_torch_fused, adamw_8bit, adafactor or sgd.",
        )
        ours = "adamw"
    why = "" if written else f"the tool's default, {name}"
    request.keys["optim.name"] = Asked(ours, tuple(written), why)
    if name in _FOREACH:
        request.keys["optim.implementation"] = Asked("foreach", tuple(written), why)
    if name.startswith("paged"):
        request.find(
            "not forecast",
            written,
            "its states may move to the host when memory is short; they are forecast on the device",
            "Use --strategy ...+offload_cpu to have them there by plan.",
        )


def read_rate_schedule(request: ToolRequest, section: FileSection, key: str, fallback: str) -> None:
    """Add the schedule of the learning rate; an unknown schedule has no influence on a forecast.

    Args:
        request: gets `optim.schedule`.
        section: the file.
        key: the key of the schedule.
        fallback: the tool's default.
    """
    name = str(section.get(key) or fallback).lower()
    if name in SCHEDULE_NAMES:
        why = "" if section.get(key) is not None else "the tool's default"
        request.keys["optim.schedule"] = Asked(
            SCHEDULE_NAMES[name], tuple(section.written(key)), why
        )
    else:
        request.outside.append(key)
