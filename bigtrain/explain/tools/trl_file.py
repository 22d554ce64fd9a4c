"""TRL's YAML: the keys of `trl.SFTConfig`, `transformers.TrainingArguments`, `trl.ModelConfig`."""

from __future__ import annotations

from bigtrain.errors import ConfigError, did_you_mean
from bigtrain.explain.config_file import ConfigFile, find_referenced, read_config_file
from bigtrain.explain.request import Asked, FileSection, ToolRequest, said_true
from bigtrain.explain.tools.accelerate_file import read_accelerate
from bigtrain.explain.tools.deepspeed_file import read_deepspeed
from bigtrain.explain.tools.key_rules import (
    KeyRule,
    KeyTable,
    apply_rules,
    default,
    read_numbers,
    sort_remaining,
)
from bigtrain.explain.tools.trainer_keys import (
    AdapterKeys,
    quantise,
    read_adapters,
    read_fsdp,
    read_optimizer,
    read_rate_schedule,
)

TRL_MARKS = ("model_name_or_path", "per_device_train_batch_size")
"""Keys that identify a file of TRL."""
PROFILES = {
    "single_gpu": ("single", 1),
    "multi_gpu": ("ddp", 8),
    "zero1": ("zero1", 8),
    "zero2": ("zero2", 8),
    "zero3": ("zero3", 8),
    "fsdp1": ("fsdp", 8),
    "fsdp2": ("fsdp", 8),
}
"""By profile that `accelerate_config` may name, bigtrain's preset and the number of processes."""
_ADAPTER = ("lora_*", "use_rslora", "use_dora")
_FLASH = (
    *("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"),
    *("kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"),
)


def _packs_by_length(section: FileSection) -> bool:
    wrapped = section.get("packing_strategy") == "wrapped"
    return (section.is_on("packing") and not wrapped) or section.is_on("padding_free")


def _recomputes_in_fsdp(section: FileSection) -> bool:
    options = section.inner("fsdp_config")
    return options is not None and (
        options.is_on("activation_checkpointing") or options.is_on("fsdp_activation_checkpointing")
    )


_RULES = (
    KeyRule(
        "contradiction",
        ("bf16", "fp16"),
        lambda s: said_true(s.get("bf16")) and said_true(s.get("fp16")),
        "there is one precision, and transformers refuses both",
        "Leave fp16 out.",
    ),
    KeyRule(
        "contradiction",
        ("deepspeed", "fsdp"),
        lambda s: bool(s.get("deepspeed")) and bool(s.get("fsdp")),
        "both shard the same states; it is forecast with DeepSpeed",
        "Leave one of them out.",
    ),
    KeyRule(
        "contradiction",
        ("deepspeed", "accelerate_config"),
        lambda s: bool(s.get("deepspeed")) and bool(s.get("accelerate_config")),
        "both say how ranks share the model; it is forecast with accelerate_config",
        "Name the DeepSpeed file in the Accelerate file.",
    ),
    KeyRule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: s.is_on("load_in_8bit") and s.is_on("load_in_4bit"),
        "the weights have one dtype, and TRL refuses both",
        "Leave load_in_8bit out.",
    ),
    KeyRule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: not s.is_on("use_peft"),
        "quantised weights cannot be trained, and use_peft is not on",
        "Write use_peft: true.",
    ),
    KeyRule(
        "contradiction",
        ("packing", "padding_free"),
        lambda s: _packs_by_length(s) and str(s.get("attn_implementation")) not in _FLASH,
        "only FlashAttention knows where a document ends, so packed documents see each other",
        "Write attn_implementation: flash_attention_2.",
    ),
    KeyRule(
        "contradiction",
        ("packing_strategy",),
        lambda s: s.is_on("packing") and s.get("packing_strategy") == "wrapped",
        "wrapped samples begin and end within documents that see each other",
        "Write packing_strategy: bfd.",
    ),
    KeyRule(
        "contradiction",
        ("use_liger_kernel", "loss_type"),
        lambda s: s.is_on("use_liger_kernel") and s.get("loss_type") == "chunked_nll",
        "both compute the loss without whole logits, and TRL refuses both",
        "Leave loss_type out.",
    ),
    KeyRule(
        "contradiction",
        ("gradient_checkpointing", "fsdp_config"),
        lambda s: s.is_on("gradient_checkpointing") and _recomputes_in_fsdp(s),
        "blocks would be recomputed twice",
        "Write gradient_checkpointing: false.",
    ),
    KeyRule(
        "no effect",
        _ADAPTER,
        lambda s: not s.is_on("use_peft"),
        "use_peft is not on, so all parameters are trained",
        "Write use_peft: true, or leave them out.",
    ),
    KeyRule(
        "no effect",
        ("bnb_4bit_*", "use_bnb_nested_quant"),
        lambda s: not s.is_on("load_in_4bit"),
        "load_in_4bit is not on",
        "Write load_in_4bit: true, or leave it out.",
    ),
    KeyRule(
        "no effect",
        ("gradient_checkpointing_kwargs",),
        lambda s: s.get("gradient_checkpointing") is False,
        "gradient_checkpointing is off",
        "Leave it out.",
    ),
    KeyRule(
        "no effect",
        ("packing_strategy", "eval_packing"),
        lambda s: not s.is_on("packing") and not s.is_on("eval_packing"),
        "packing is not on",
        "Write packing: true, or leave it out.",
    ),
    KeyRule(
        "no effect",
        ("num_train_epochs",),
        lambda s: (s.get("max_steps") or -1) > 0,
        "max_steps decides the length",
        "Leave it out.",
    ),
    KeyRule(
        "no effect",
        ("warmup_ratio",),
        lambda s: bool(s.get("warmup_steps")),
        "warmup_steps goes before it",
        "Leave it out.",
    ),
    KeyRule(
        "no effect",
        ("fsdp_config",),
        lambda s: not s.get("fsdp"),
        "fsdp is not on",
        "Write fsdp: true, or leave it out.",
    ),
)
TRL_KEYS = KeyTable(
    tool="TRL",
    numbers={
        "per_device_train_batch_size": ("train.micro_batch_size", "count"),
        "gradient_accumulation_steps": ("train.accumulation_steps", "count"),
        "learning_rate": ("optim.lr", "number"),
        "weight_decay": ("optim.weight_decay", "number"),
        "adam_epsilon": ("optim.eps", "number"),
        "num_train_epochs": ("train.epochs", "number"),
    },
    read=frozenset(
        (
            *("model_name_or_path", "max_length", "max_seq_length", "max_grad_norm", "max_steps"),
            *("bf16", "fp16", "tf32", "dtype", "torch_dtype", "gradient_checkpointing", "optim"),
            *("gradient_checkpointing_kwargs", "activation_offloading", "lr_scheduler_type"),
            *("warmup_steps", "warmup_ratio", "use_peft", "lora_r", "lora_alpha", "lora_dropout"),
            *("lora_target_modules", "lora_modules_to_save", "load_in_4bit", "load_in_8bit"),
            *("bnb_4bit_quant_storage", "deepspeed", "fsdp", "fsdp_config", "accelerate_config"),
            *("num_processes", "packing", "packing_strategy", "padding_free", "loss_type"),
            *("use_liger_kernel", "attn_implementation", "model_init_kwargs", "use_cpu"),
            "parallelism_config",
        )
    ),
    outside=(
        *("output_dir", "overwrite_output_dir", "seed", "data_seed", "adam_beta*", "lr_*"),
        *("logging_*", "log_*", "report_to", "run_name", "project", "trackio_*", "disable_tqdm"),
        *("eval_*", "per_device_eval_batch_size", "prediction_loss_only", "include_*", "do_*"),
        *("batch_eval_metrics", "save_*", "push_to_hub*", "hub_*", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better", "ignore_data_skip", "resume_from_*"),
        *("dataloader_*", "dataset_*", "datasets", "remove_unused_columns", "label_names"),
        *("train_sampling_strategy", "length_column_name", "group_by_length", "ddp_timeout"),
        *("ddp_backend", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "debug"),
        *("skip_memory_metrics", "local_rank", "accelerator_config", "full_determinism"),
        *("completion_only_loss", "assistant_only_loss", "eos_token", "pad_token", "env"),
        *("chat_template_path", "truncation_mode", "shuffle_dataset", "eval_packing", "use_cache"),
        *("pad_to_multiple_of", "model_revision", "trust_remote_code", "lora_task_type"),
        *("bnb_4bit_quant_type", "use_bnb_nested_quant", "average_tokens_across_devices"),
        *("label_smoothing_factor", "bf16_full_eval", "fp16_full_eval", "enable_jit_checkpoint"),
        *("liger_kernel_config", "torch_empty_cache_steps", "restore_callback_states_*"),
        *("streaming", "test_split_size", "ignore_bias_buffers", "config", "evaluation_strategy"),
        *("gradient_checkpointing_use_reentrant", "ddp_static_graph", "num_machines"),
        *("machine_rank", "main_process_*", "use_bnb_*", "bnb_4bit_compute_dtype"),
    ),
    not_forecast={
        "auto_find_batch_size": ("the batch is found by running", "Use the planner's batch."),
        "torch_compile*": (
            "compiled programs keep other activations",
            "Use train.compile=blocks, and measure with bigtrain compare.",
        ),
        "use_rslora": ("rsLoRA scales otherwise and takes as much memory", "Leave it out."),
        "use_dora": ("DoRA has no counterpart; it is forecast as LoRA", "Leave it out."),
        "lora_target_parameters": ("adapters of single parameters", "Name layers."),
        "neftune_noise_alpha": ("noise on the embeddings; it takes no memory", "Leave it out."),
        "optim_*": ("arguments of the optimizer", "Set keys of optim."),
        "ddp_bucket_cap_mb": (
            "sizes of messages",
            "With ddp use strategy.replicate.bucket_size=25MiB.",
        ),
        "activation_checkpointing*": (
            "its options have no counterpart",
            "Use gradient_checkpointing: true.",
        ),
        "jit_mode_eval": ("it is for evaluation", "Leave it out."),
    },
    rules=_RULES,
)


def read_trl_file(file: ConfigFile) -> ToolRequest:
    """Read a file for TRL's supervised trainer.

    Raises:
        ConfigError: a value is impossible, or a file that the file names is missing.
    """
    request, section = ToolRequest("TRL", file), FileSection(file, file.values)
    if section.get("model_name_or_path") is not None:
        request.model = section.asked("model_name_or_path")
    read_numbers(request, section, TRL_KEYS)
    default(request, "train.micro_batch_size", 8, "the default of transformers")
    default(request, "train.accumulation_steps", 1, "the default of transformers")
    default(request, "train.epochs", 3, "the default of transformers")
    default(request, "optim.lr", 2e-5, "TRL's default")
    _read_lengths(request, section)
    clip = section.number("max_grad_norm")
    if clip is None:
        default(request, "optim.clip_norm", 1.0, "the default of transformers")
    elif clip.value:
        request.keys["optim.clip_norm"] = clip
    read_optimizer(request, section, "optim", "adamw_torch_fused")
    read_rate_schedule(request, section, "lr_scheduler_type", "linear")
    _read_precision(request, section)
    _read_recompute(request, section)
    ranks = section.count("num_processes")
    request.on_cpu = section.is_on("use_cpu")
    _read_sharding(request, section)
    if ranks is not None:
        request.ranks = ranks
    _read_adapter(request, section)
    _read_loss(request, section)
    apply_rules(request, section, TRL_KEYS.rules)
    sort_remaining(request, section, TRL_KEYS)
    return request


def _read_lengths(request: ToolRequest, section: FileSection) -> None:
    key = "max_length" if section.get("max_length") is not None else "max_seq_length"
    length = section.count(key)
    if length is not None:
        request.keys["data.args.sequence_length"] = length
    else:
        default(request, "data.args.sequence_length", 1024, "TRL's default")
    steps = section.number("max_steps", least=-1)
    if steps is not None and steps.value > 0:
        request.keys["train.steps"] = Asked(int(steps.value), steps.written)
        request.keys.pop("train.epochs", None)
    warmup, ratio = section.number("warmup_steps"), section.number("warmup_ratio")
    if warmup is not None and 0 < warmup.value < 1:
        ratio, warmup = warmup, None
    epochs = request.keys.get("train.epochs")
    if warmup is not None and warmup.value:
        request.keys["optim.warmup_steps"] = Asked(int(warmup.value), warmup.written)
    elif ratio is not None and ratio.value and epochs is not None:
        request.keys["optim.warmup_epochs"] = Asked(ratio.value * epochs.value, ratio.written)


def _read_precision(request: ToolRequest, section: FileSection) -> None:
    bf16, fp16 = section.get("bf16"), section.get("fp16")
    if said_true(fp16) and not said_true(bf16):
        request.keys["train.precision"] = section.asked("fp16", "bf16")
        request.find(
            "not forecast",
            section.written("fp16"),
            "fp16 and its loss scaling have no counterpart; it is forecast as bf16",
            "Write bf16: true.",
        )
    elif bf16 is None or said_true(bf16):
        why = "" if bf16 is not None else "TRL's default"
        request.keys["train.precision"] = Asked("bf16", tuple(section.written("bf16")), why)
    else:
        request.keys["train.precision"] = section.asked("bf16", "fp32")
    if section.is_on("tf32"):
        request.keys["train.matmul"] = section.asked("tf32", "high")


def _read_recompute(request: ToolRequest, section: FileSection) -> None:
    if section.get("gradient_checkpointing") is None:
        request.added["full"] = Asked("full", why="TRL's default, gradient_checkpointing: true")
    elif section.is_on("gradient_checkpointing"):
        request.added["full"] = section.asked("gradient_checkpointing", "full")
    if section.is_on("activation_offloading"):
        word = "offload_activations_cpu"
        request.added[word] = section.asked("activation_offloading", word)


def _read_sharding(request: ToolRequest, section: FileSection) -> None:
    """Add the strategy, from Accelerate's or DeepSpeed's file, or from FSDP's options."""
    accelerate, deepspeed = section.get("accelerate_config"), section.get("deepspeed")
    if accelerate is not None:
        _read_accelerate(request, section, str(accelerate))
    elif isinstance(deepspeed, str):
        found = find_referenced(deepspeed, section.file, "deepspeed")
        file = read_config_file(found, f"{section.place('deepspeed')}: deepspeed")
        read_deepspeed(request, FileSection(file, file.values), "transformers")
        request.strategy = Asked(request.strategy.value, tuple(section.written("deepspeed")))
    elif (inner := section.inner("deepspeed")) is not None:
        read_deepspeed(request, inner, "transformers")
    elif section.get("fsdp"):
        _read_fsdp(request, section)
    dtype = str(section.get("dtype") or section.get("torch_dtype") or "").removeprefix("torch.")
    replicated = request.strategy.value in ("ddp", "single")
    is_low = dtype in ("bfloat16", "auto") and replicated and not section.is_on("use_peft")
    if is_low and request.keys["optim.name"].value in ("adamw", "adamw_8bit", "adamw_4bit"):
        written = tuple(section.written("dtype", "torch_dtype"))
        request.keys["optim.master_weights"] = Asked(False, written)
        request.keys.pop("optim.implementation", None)


def _read_accelerate(request: ToolRequest, section: FileSection, name: str) -> None:
    written = tuple(section.written("accelerate_config"))
    if name in PROFILES:
        word, ranks = PROFILES[name]
        request.strategy = Asked(word, written)
        request.ranks = Asked(ranks, why=f"TRL's profile {name}")
        return
    if "/" not in name and not name.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{section.place('accelerate_config')}: accelerate_config={name}"
            f"{did_you_mean(name, PROFILES)} Write one of {', '.join(PROFILES)}, or a path."
        )
    found = find_referenced(name, section.file, "accelerate_config")
    read_accelerate(
        request, read_config_file(found, f"{section.file.path}: accelerate_config"), "TRL"
    )


def _read_fsdp(request: ToolRequest, section: FileSection) -> None:
    options = section.inner("fsdp_config") or FileSection(section.file, {}, "fsdp_config.")
    flags = section.get("fsdp")
    names = flags.split() if isinstance(flags, str) else flags if isinstance(flags, list) else []
    read_fsdp(request, options, 2, tuple(section.written("fsdp")))
    if "shard_grad_op" in names:
        request.strategy = Asked("fsdp_zero2", tuple(section.written("fsdp")))
    if "offload" in names:
        for word in ("offload_cpu", "offload_parameters_cpu"):
            request.added[word] = Asked(word, tuple(section.written("fsdp")))


def _read_adapter(request: ToolRequest, section: FileSection) -> None:
    if not section.is_on("use_peft"):
        return
    keys = AdapterKeys("TRL", rank_default=16, alpha_default=32, dropout_default=0.05)
    read_adapters(request, section, keys)
    if section.is_on("load_in_4bit"):
        written = section.written("load_in_4bit")
        quantise(request, written)
        stored = section.get("bnb_4bit_quant_storage")
        if request.strategy.value == "zero3" and stored in (None, "uint8"):
            request.find(
                "contradiction",
                [*written, *request.strategy.written],
                "ZeRO stage 3 shards floating-point weights, and those in 4 bits are stored as "
                "uint8, whole on each rank",
                "Write bnb_4bit_quant_storage: bfloat16, or use stage 2.",
            )
    elif section.is_on("load_in_8bit"):
        request.find(
            "not forecast",
            section.written("load_in_8bit"),
            "weights in 8 bits have no counterpart; they are forecast in bf16",
            "Use load_in_4bit: true.",
        )
    elif section.get("dtype") is None and section.get("torch_dtype") is None:
        request.find(
            "not forecast",
            section.written("use_peft"),
            "without dtype it depends on the version of TRL whether frozen weights are fp32; they "
            "are forecast in bf16",
            "Write dtype: bfloat16.",
        )


def _read_loss(request: ToolRequest, section: FileSection) -> None:
    kind = section.get("loss_type")
    if section.is_on("use_liger_kernel"):
        request.keys["model.chunked_loss"] = section.asked("use_liger_kernel", True)
    elif kind is None:
        why = "TRL's default, loss_type: chunked_nll"
        request.keys["model.chunked_loss"] = Asked(True, why=why)
    else:
        request.keys["model.chunked_loss"] = section.asked("loss_type", kind == "chunked_nll")
    if section.get("attn_implementation") == "eager":
        asked = section.asked("attn_implementation", "eager")
        request.keys["model.args.attn_implementation"] = asked
    if section.get("parallelism_config"):
        request.find(
            "not forecast",
            section.written("parallelism_config"),
            "sizes of the mesh are read from an Accelerate file only",
            "Write them in the file of accelerate_config.",
        )
