"""Read a YAML file of axolotl."""

from __future__ import annotations

from bigtrain.errors import ConfigError
from bigtrain.explain.config_file import ConfigFile, find_referenced, read_config_file
from bigtrain.explain.request import Asked, FileSection, ToolRequest, said_true
from bigtrain.explain.tools.axolotl_keys import (
    AXOLOTL_KEYS,
    CHUNKING,
    fsdp_version_of,
    has_fsdp,
)
from bigtrain.explain.tools.deepspeed_file import read_deepspeed
from bigtrain.explain.tools.key_rules import apply_rules, default, read_numbers, sort_remaining
from bigtrain.explain.tools.trainer_keys import (
    AdapterKeys,
    FsdpOptions,
    quantise,
    read_adapters,
    read_fsdp,
    read_optimizer,
    read_rate_schedule,
)
from bigtrain.hub.lora import ALL_LINEAR


def read_axolotl_file(file: ConfigFile) -> ToolRequest:
    """Read a file of axolotl.

    Raises:
        ConfigError: a value is impossible, or a file that the file names is missing.
    """
    request, section = ToolRequest("axolotl", file), FileSection(file, file.values)
    if section.get("base_model") is not None:
        request.model = section.asked("base_model")
    read_numbers(request, section, AXOLOTL_KEYS)
    default(request, "train.micro_batch_size", 1, "axolotl's default")
    default(request, "data.args.sequence_length", 512, "axolotl's default")
    _read_batch(request, section)
    clip = section.number("max_grad_norm")
    if clip is None:
        default(request, "optim.clip_norm", 1.0, "the default of transformers")
    elif clip.value:
        request.keys["optim.clip_norm"] = clip
    read_optimizer(request, section, "optimizer", "adamw_torch_fused")
    read_rate_schedule(request, section, "lr_scheduler", "cosine")
    _read_warmup(request, section)
    _read_precision(request, section)
    _read_recompute(request, section)
    _read_sharding(request, section)
    _read_adapter(request, section)
    _read_loss(request, section)
    apply_rules(request, section, AXOLOTL_KEYS.rules)
    sort_remaining(request, section, AXOLOTL_KEYS)
    return request


def _read_batch(request: ToolRequest, section: FileSection) -> None:
    """Add the ranks from the mesh sizes, and the accumulation from the older key `batch_size`."""
    sizes = [
        asked
        for key in ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size")
        if (asked := section.count(key)) is not None
    ]
    world = section.count("world_size")
    if world is not None:
        request.ranks = world
    elif len(sizes) > 1 or section.count("dp_shard_size") is not None:
        product = 1
        for asked in sizes:
            product *= asked.value
        request.ranks = Asked(product, tuple(each for asked in sizes for each in asked.written))
    batch, micro = section.count("batch_size"), request.keys["train.micro_batch_size"]
    if batch is not None and section.get("gradient_accumulation_steps") is None:
        steps = max(1, batch.value // micro.value)
        request.keys["train.accumulation_steps"] = Asked(steps, batch.written)
    default(request, "train.accumulation_steps", 1, "axolotl's default")
    slices = section.count("tensor_parallel_size")
    if slices is not None and slices.value > 1:
        request.added["tensor"] = Asked("tensor", slices.written)
        request.keys["mesh.tp"] = slices


def _read_warmup(request: ToolRequest, section: FileSection) -> None:
    ratio, epochs = section.number("warmup_ratio"), request.keys.get("train.epochs")
    steps = request.keys.pop("optim.warmup_steps", None)
    if steps is not None and steps.value:
        request.keys["optim.warmup_steps"] = Asked(int(steps.value), steps.written)
    elif ratio is not None and ratio.value and epochs is not None:
        request.keys["optim.warmup_epochs"] = Asked(ratio.value * epochs.value, ratio.written)


def _read_precision(request: ToolRequest, section: FileSection) -> None:
    """Add the precision. The default is bf16, as in axolotl."""
    low = [key for key in ("bf16", "bfloat16") if said_true(section.get(key))]
    half = [key for key in ("fp16", "float16") if said_true(section.get(key))]
    if low or (section.get("bf16") is None and not half and not section.is_on("float32")):
        written = tuple(section.written(*low))
        why = "" if written else "axolotl's default, bf16: auto"
        request.keys["train.precision"] = Asked("bf16", written, why)
    elif half:
        request.keys["train.precision"] = section.asked(half[0], "bf16")
        request.find(
            "not forecast",
            section.written(*half),
            "fp16 and its loss scaling have no counterpart; it is forecast as bf16",
            "Write bf16: true.",
        )
    else:
        written = tuple(section.written("bf16", "float32"))
        request.keys["train.precision"] = Asked("fp32", written)
    if section.is_on("tf32"):
        request.keys["train.matmul"] = section.asked("tf32", "high")


def _read_recompute(request: ToolRequest, section: FileSection) -> None:
    mode = section.get("gradient_checkpointing")
    if section.is_on("gradient_checkpointing"):
        request.added["full"] = section.asked("gradient_checkpointing", "full")
    moved = {"offload": "cpu", "offload_disk": "disk"}.get(str(mode))
    key = "gradient_checkpointing"
    if section.is_on("activation_offloading"):
        key = "activation_offloading"
        moved = "disk" if section.get(key) == "disk" else "cpu"
    if moved is not None:
        word = f"offload_activations_{moved}"
        request.added[word] = section.asked(key, word)


def _read_sharding(request: ToolRequest, section: FileSection) -> None:
    """Add the strategy, from DeepSpeed's file or FSDP's options, if there are any."""
    deepspeed = section.get("deepspeed")
    if isinstance(deepspeed, str):
        found = find_referenced(deepspeed, section.file, "deepspeed")
        file = read_config_file(found, f"{section.place('deepspeed')}: deepspeed")
        read_deepspeed(request, FileSection(file, file.values), "axolotl")
        request.strategy = Asked(request.strategy.value, tuple(section.written("deepspeed")))
    elif isinstance(deepspeed, dict):
        inner = section.inner("deepspeed")
        if inner is not None:
            read_deepspeed(request, inner, "axolotl")
    elif has_fsdp(section):
        _read_fsdp(request, section)
    elif request.keys["train.precision"].value == "bf16" and not section.get("adapter"):
        _load_in_bf16(request)


def _read_fsdp(request: ToolRequest, section: FileSection) -> None:
    options = section.inner("fsdp_config") or FileSection(section.file, {}, "fsdp_config.")
    flags = section.get("fsdp") or []
    names = [flags] if isinstance(flags, str) else list(flags)
    written = tuple(section.written("fsdp", "fsdp_config")[:1])
    read_fsdp(request, options, fsdp_version_of(section), written)
    if "offload" in names and not FsdpOptions(options).is_on("offload_params"):
        stated = FsdpOptions(options).written("offload_params")
        request.find(
            "contradiction" if stated else "no effect",
            [*section.written("fsdp"), *stated],
            "offload is on in one of them and off in the other"
            if stated
            else "offload is written in fsdp_config",
            "Write fsdp_config.offload_params: true, or leave offload out.",
        )


def _load_in_bf16(request: ToolRequest) -> None:
    """Set bf16 parameters without fp32 master weights, if the optimizer supports them."""
    if request.keys["optim.name"].value in ("adamw", "adamw_8bit", "adamw_4bit"):
        why = "axolotl loads the weights in bf16, and nothing keeps them in fp32"
        request.keys["optim.master_weights"] = Asked(False, why=why)
        request.keys.pop("optim.implementation", None)


def _read_adapter(request: ToolRequest, section: FileSection) -> None:
    adapter = section.get("adapter")
    if adapter is None:
        return
    if adapter not in ("lora", "qlora"):
        raise ConfigError(
            f"{section.place('adapter')}: adapter={adapter} has no counterpart. Write adapter: "
            "lora, or leave it out."
        )
    read_adapters(request, section, AdapterKeys("peft", alpha_default=8))
    names = list(request.keys.get("model.lora.targets", Asked([])).value)
    if section.is_on("lora_target_linear"):
        both = tuple(section.written("lora_target_linear", "lora_target_modules"))
        request.keys["model.lora.targets"] = Asked([ALL_LINEAR, *names], both)
    peft = section.inner("peft")
    four = section.written("load_in_4bit") if section.is_on("load_in_4bit") else []
    if not four and peft is not None and peft.get("weight_dtype") in ("nf4", "int4"):
        four = peft.written("weight_dtype")
    if four:
        quantise(request, four)
        _check_sharded_quantised(request, section)
    if section.is_on("load_in_8bit"):
        request.find(
            "not forecast",
            section.written("load_in_8bit"),
            "weights in 8 bits have no counterpart; they are forecast in bf16",
            "Use load_in_4bit: true with adapter: qlora, or none of them.",
        )


def _check_sharded_quantised(request: ToolRequest, section: FileSection) -> None:
    """Report 4-bit weights that ZeRO stage 3 leaves whole on each rank."""
    storage = (section.get("bnb_config_kwargs") or {}).get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        return
    if request.strategy.value == "zero3":
        request.find(
            "contradiction",
            [*section.written("load_in_4bit"), *request.strategy.written],
            "ZeRO stage 3 shards floating-point weights, and those in 4 bits are stored as uint8, "
            "whole on each rank",
            "Write bnb_config_kwargs: {bnb_4bit_quant_storage: bfloat16}, or use stage 2.",
        )


def _read_loss(request: ToolRequest, section: FileSection) -> None:
    plugins = [str(each) for each in section.get("plugins") or []]
    on = [key for key in CHUNKING if section.is_on(key)]
    cut = any(each.endswith("CutCrossEntropyPlugin") for each in plugins)
    if on or cut:
        written = tuple(section.written(*on, *(("plugins",) if cut else ())))
        request.keys["model.chunked_loss"] = Asked(True, written)
    else:
        why = "as transformers computes it"
        request.keys["model.chunked_loss"] = Asked(False, why=why)
    others = [each for each in plugins if not each.endswith("CutCrossEntropyPlugin")]
    others = [each for each in others if not (each.endswith("LigerPlugin") and on)]
    if others:
        request.find(
            "not forecast",
            section.written("plugins"),
            f"the effect of {', '.join(each.rpartition('.')[2] for each in others)} is not known",
            "Measure it.",
        )
    if section.is_on("eager_attention") or section.get("attn_implementation") == "eager":
        written = tuple(section.written("eager_attention", "attn_implementation"))
        request.keys["model.args.attn_implementation"] = Asked("eager", written)
