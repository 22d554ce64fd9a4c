"""axolotl's YAML."""

from __future__ import annotations

from bigtrain.errors import ConfigError
from bigtrain.explain.config_file import ConfigFile, find_referenced, read_config_file
from bigtrain.explain.deepspeed_file import read_deepspeed
from bigtrain.explain.key_rules import (
    KeyTable,
    Rule,
    apply_rules,
    default,
    read_numbers,
    sort_remaining,
)
from bigtrain.explain.request import Asked, Request, Section, said_true
from bigtrain.explain.trainer_keys import (
    ALL_LINEAR,
    AdapterKeys,
    FsdpOptions,
    quantise,
    read_adapters,
    read_fsdp,
    read_optimizer,
    read_schedule,
)

MARKS = ("base_model",)
"""Keys by which a file is known to be axolotl's."""
_ATTENTION = ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention")
_ATTENTION += ("s2_attention", "eager_attention", "sage_attention")
_ADAPTER = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_*", "lora_modules_to_save")
_ADAPTER += ("lora_fan_in_fan_out", "lora_qkv_kernel", "lora_mlp_kernel", "lora_o_kernel")
_ADAPTER += ("peft_*", "loraplus_*", "bnb_config_kwargs")
_CHUNKING = ("liger_fused_linear_cross_entropy", "chunked_cross_entropy", "cut_cross_entropy")


def _has_fsdp(section: Section) -> bool:
    return bool(section.get("fsdp") or section.get("fsdp_config"))


def _knows_documents(section: Section) -> bool:
    named = str(section.get("attn_implementation") or "")
    return named not in ("", "eager") or any(
        section.is_on(key) for key in _ATTENTION if key not in ("s2_attention", "eager_attention")
    )


def _offloads(section: Section) -> bool:
    options = section.inner("fsdp_config")
    return options is not None and FsdpOptions(options).is_on("offload_params")


def _fsdp_version(section: Section) -> int:
    options = section.inner("fsdp_config")
    said = section.get("fsdp_version") or (options and FsdpOptions(options).get("version"))
    return 2 if str(said) == "2" else 1


RULES = (
    Rule(
        "contradiction",
        ("bf16", "fp16"),
        lambda s: said_true(s.get("bf16")) and said_true(s.get("fp16")),
        "there is one precision",
        "Leave fp16 out.",
    ),
    Rule(
        "contradiction",
        ("deepspeed", "fsdp", "fsdp_config"),
        lambda s: bool(s.get("deepspeed")) and _has_fsdp(s),
        "both shard the same states, and axolotl refuses both; it is forecast with DeepSpeed",
        "Leave one of them out.",
    ),
    Rule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: s.is_on("load_in_8bit") and s.is_on("load_in_4bit"),
        "the weights have one dtype",
        "Leave load_in_8bit out.",
    ),
    Rule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: not s.get("adapter") and not s.get("peft"),
        "quantised weights cannot be trained, and no adapter is",
        "Write adapter: qlora, or load_in_4bit: false.",
    ),
    Rule(
        "contradiction",
        ("adapter",),
        lambda s: (
            s.get("adapter") == "qlora"
            and not (s.is_on("load_in_4bit") or s.get("peft") or s.is_on("gptq"))
        ),
        "qlora trains adapters of weights in 4 bits, and load_in_4bit is not on",
        "Write load_in_4bit: true, or adapter: lora.",
    ),
    Rule(
        "contradiction",
        ("sample_packing",),
        lambda s: not _knows_documents(s),
        "without an attention that knows where documents end, packed documents see each other",
        "Write flash_attention: true or sdp_attention: true.",
    ),
    Rule(
        "contradiction",
        _ATTENTION,
        lambda s: sum(s.is_on(key) for key in _ATTENTION) > 1,
        "there is one attention",
        "Keep one of them.",
    ),
    Rule(
        "contradiction",
        ("gradient_accumulation_steps", "batch_size"),
        lambda s: bool(s.get("batch_size")) and bool(s.get("gradient_accumulation_steps")),
        "batch_size decides the accumulation, and axolotl refuses both",
        "Leave batch_size out.",
    ),
    Rule(
        "contradiction",
        ("warmup_steps", "warmup_ratio"),
        lambda s: bool(s.get("warmup_steps")) and bool(s.get("warmup_ratio")),
        "both say how long the warm-up is",
        "Leave one of them out.",
    ),
    Rule(
        "contradiction",
        ("optimizer", "fsdp_version"),
        lambda s: (
            str(s.get("optimizer")) in ("adamw_8bit", "adamw_bnb_8bit")
            and _has_fsdp(s)
            and _fsdp_version(s) == 2
        ),
        "the optimizer of bitsandbytes fails on the shards of FSDP 2",
        "Write optimizer: adamw_torch_8bit.",
    ),
    Rule(
        "contradiction",
        ("optimizer",),
        lambda s: _offloads(s) and "bit" in str(s.get("optimizer") or ""),
        "optimizers in 8 and 4 bits run on a GPU, and offload_params moves their states to the host",
        "Write optimizer: adamw_torch_fused, or offload_params: false.",
    ),
    Rule(
        "no effect",
        _ADAPTER,
        lambda s: not s.get("adapter"),
        "adapter is not set, so all parameters are trained",
        "Write adapter: lora, or leave them out.",
        even_off=False,
    ),
    Rule(
        "no effect",
        ("gradient_checkpointing_kwargs",),
        lambda s: not s.is_on("gradient_checkpointing"),
        "gradient_checkpointing is not on",
        "Write gradient_checkpointing: true, or leave it out.",
    ),
    Rule(
        "no effect",
        ("num_epochs",),
        lambda s: bool(s.get("max_steps")),
        "max_steps decides the length",
        "Leave it out.",
    ),
    Rule(
        "no effect",
        ("group_by_length", "pad_to_sequence_len"),
        lambda s: s.is_on("sample_packing") and s.is_on("group_by_length"),
        "packed samples have one length",
        "Leave group_by_length out.",
    ),
    Rule(
        "no effect",
        ("eval_sample_packing", "sample_packing_*"),
        lambda s: not s.is_on("sample_packing") and not s.is_on("eval_sample_packing"),
        "sample_packing is not on",
        "Leave it out.",
    ),
    Rule(
        "no effect",
        ("fsdp_version", "fsdp_final_state_dict_type"),
        lambda s: not _has_fsdp(s),
        "neither fsdp nor fsdp_config is set",
        "Leave it out.",
    ),
)
TABLE = KeyTable(
    tool="axolotl",
    numbers={
        "micro_batch_size": ("train.micro_batch_size", "count"),
        "gradient_accumulation_steps": ("train.accumulation_steps", "count"),
        "sequence_len": ("data.args.sequence_length", "count"),
        "learning_rate": ("optim.lr", "number"),
        "weight_decay": ("optim.weight_decay", "number"),
        "adam_epsilon": ("optim.eps", "number"),
        "warmup_steps": ("optim.warmup_steps", "number"),
        "num_epochs": ("train.epochs", "number"),
        "max_steps": ("train.steps", "count"),
    },
    read=frozenset(
        (
            *("base_model", "adapter", "load_in_4bit", "load_in_8bit", "peft", "batch_size"),
            *("bf16", "fp16", "bfloat16", "float16", "float32", "tf32", "max_grad_norm"),
            *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading"),
            *("optimizer", "lr_scheduler", "deepspeed", "fsdp", "fsdp_config", "fsdp_version"),
            *("sample_packing", "eval_sample_packing", "plugins", "attn_implementation"),
            *("warmup_ratio", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
            *("lora_target_linear", "lora_modules_to_save", "world_size", "bnb_config_kwargs"),
            *("tensor_parallel_size", "dp_shard_size", "dp_replicate_size", *_ATTENTION),
            *_CHUNKING,
        )
    ),
    outside=(
        *("base_model_*", "tokenizer*", "processor_type", "model_type", "trust_remote_code"),
        *("is_*_derived_model", "datasets", "test_datasets", "dataset*", "shuffle_*", "chat_*"),
        *("val_set_size", "output_dir", "hub_*", "wandb_*", "mlflow_*", "comet_*", "use_*board"),
        *("gradio_*", "eval_*", "evals_per_epoch", "evaluation_strategy", "save_*", "saves_*"),
        *("logging_steps", "special_tokens", "tokens", "added_tokens_*", "strict", "seed"),
        *("resume_from_checkpoint", "auto_resume_*", "early_stopping_patience", "train_on_inputs"),
        *("lr_scheduler_kwargs", "cosine_*", "lr_*", "adam_beta*", "loss_watchdog_*"),
        *("push_dataset_to_hub", "hf_use_auth_token", "dataloader_*", "ddp_timeout", "debug"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "local_rank"),
        *("pad_to_sequence_len", "sample_packing_*", "group_by_length", "min_sample_len"),
        *("excess_length_strategy", "remove_unused_columns", "low_cpu_mem_usage", "xformers_*"),
        *("lora_model_dir", "lora_on_cpu", "lora_fan_in_fan_out", "qlora_sharded_model_loading"),
        *("loraplus_*", "merge_*", "profiler_*", "include_tokens_per_second", "accelerator_config"),
        *(
            "experimental_skip_move_to_device",
            "fsdp_final_state_dict_type",
            "default_system_message",
        ),
        *("eot_tokens", "role*", "field*", "do_*", "gc_steps", "ddp_find_unused_parameters"),
        *("ddp_broadcast_buffers", "mean_resizing_embeddings", "streaming", "trl", "vllm", "ray_*"),
        *("use_ray", "otel_*", "device_map", "s2_*", "skip_prepare_dataset", "unsloth_rope"),
    ),
    not_forecast={
        "rl": ("preference training runs a second model", "Use a file for supervised training."),
        "reward_model": ("reward models have another loss", "Forecast a file without it."),
        "process_reward_model": ("reward models have another loss", "Forecast a file without it."),
        "context_parallel_size": (
            "a sequence that is spread over ranks; activations are forecast for whole sequences",
            "Use --strategy fsdp+tensor_sequence mesh.tp=N.",
        ),
        "sequence_parallel_degree": (
            "a sequence that is spread over ranks; activations are forecast for whole sequences",
            "Use --strategy fsdp+tensor_sequence mesh.tp=N.",
        ),
        "expert_parallel_size": ("experts are on every rank here", "Use --strategy fsdp."),
        "unfrozen_parameters": (
            "its regular expressions; all parameters are forecast as trained",
            "Use model.freeze=['*','!PATTERN'].",
        ),
        "torch_compile*": (
            "compiled programs keep other activations",
            "Use train.compile=blocks, and measure with bigtrain compare.",
        ),
        "lora_*_kernel": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "liger_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "unsloth_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "flash_attn_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "flash_optimum": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "peft_use_dora": ("DoRA has no counterpart; it is forecast as LoRA", "Leave it out."),
        "peft_use_rslora": ("rsLoRA scales otherwise and takes as much memory", "Leave it out."),
        "peft_*": ("it has no counterpart; all layers are adapted alike", "Leave it out."),
        "lora_target_parameters": ("adapters of single parameters", "Name layers."),
        "neftune_noise_alpha": ("noise on the embeddings; it takes no memory", "Leave it out."),
        "relora*": ("restarts of adapters have no counterpart", "Leave it out."),
        "lisa_*": ("layers that change during training", "Leave it out."),
        "gptq": ("weights in GPTQ's format cannot be trained here", "Use the plain weights."),
        "fp8*": ("fp8 has no counterpart; it is forecast as bf16", "Use bf16."),
        "qat": ("training with quantisation in mind has no counterpart", "Leave it out."),
        "quantization": ("it is for after the training", "Leave it out."),
        "auto_find_batch_size": ("the batch is found by running", "Use the planner's batch."),
        "ddp_bucket_cap_mb": ("sizes of messages", "Use strategy.replicate.bucket_size=25MiB."),
        "resize_token_embeddings_to_32x": ("up to 31 more rows of embeddings", "Expect the same."),
        "embedding_lr*": ("a learning rate for embeddings alone", "Leave it out."),
        "optim_*": ("arguments of the optimizer", "Set keys of optim."),
        "max_memory": ("a model spread over devices layer by layer", "Use --strategy 1f1b."),
        "gpu_memory_limit": ("a limit for loading", "Use memory.cap=SIZE."),
        "noisy_embedding_alpha": ("noise on the embeddings; it takes no memory", "Leave it out."),
        "batch_flattening": ("samples without padding", "Use data.args.packing=true."),
        "pretraining_dataset": ("a stream of data", "Use data.name=text."),
        "use_pose": ("positions with gaps take as much memory", "Leave it out."),
    },
    rules=RULES,
)


def read_axolotl_file(file: ConfigFile) -> Request:
    """Read a file of axolotl.

    Raises:
        ConfigError: a value is impossible, or a file that it names is missing.
    """
    request, section = Request("axolotl", file), Section(file, file.values)
    if section.get("base_model") is not None:
        request.model = section.asked("base_model")
    read_numbers(request, section, TABLE)
    default(request, "train.micro_batch_size", 1, "axolotl's default")
    default(request, "data.args.sequence_length", 512, "axolotl's default")
    _read_batch(request, section)
    clip = section.number("max_grad_norm")
    if clip is None:
        default(request, "optim.clip_norm", 1.0, "the default of transformers")
    elif clip.value:
        request.keys["optim.clip_norm"] = clip
    read_optimizer(request, section, "optimizer", "adamw_torch_fused")
    read_schedule(request, section, "lr_scheduler", "cosine")
    _read_warmup(request, section)
    _read_precision(request, section)
    _read_recompute(request, section)
    _read_sharding(request, section)
    _read_adapter(request, section)
    _read_loss(request, section)
    apply_rules(request, section, TABLE.rules)
    sort_remaining(request, section, TABLE)
    return request


def _read_batch(request: Request, section: Section) -> None:
    """Add the ranks that the mesh names, and the accumulation by the older key `batch_size`."""
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


def _read_warmup(request: Request, section: Section) -> None:
    ratio, epochs = section.number("warmup_ratio"), request.keys.get("train.epochs")
    steps = request.keys.pop("optim.warmup_steps", None)
    if steps is not None and steps.value:
        request.keys["optim.warmup_steps"] = Asked(int(steps.value), steps.written)
    elif ratio is not None and ratio.value and epochs is not None:
        request.keys["optim.warmup_epochs"] = Asked(ratio.value * epochs.value, ratio.written)


def _read_precision(request: Request, section: Section) -> None:
    """Add the precision: axolotl loads the weights in bf16 if the run is in bf16."""
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


def _read_recompute(request: Request, section: Section) -> None:
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


def _read_sharding(request: Request, section: Section) -> None:
    """Add the strategy: DeepSpeed's file, FSDP's options, or replicas."""
    deepspeed = section.get("deepspeed")
    if isinstance(deepspeed, str):
        found = find_referenced(deepspeed, section.file, "deepspeed")
        file = read_config_file(found, f"{section.place('deepspeed')}: deepspeed")
        read_deepspeed(request, Section(file, file.values), "axolotl")
        request.strategy = Asked(request.strategy.value, tuple(section.written("deepspeed")))
    elif isinstance(deepspeed, dict):
        inner = section.inner("deepspeed")
        if inner is not None:
            read_deepspeed(request, inner, "axolotl")
    elif _has_fsdp(section):
        _read_fsdp(request, section)
    elif request.keys["train.precision"].value == "bf16" and not section.get("adapter"):
        _load_in_bf16(request)


def _read_fsdp(request: Request, section: Section) -> None:
    options = section.inner("fsdp_config") or Section(section.file, {}, "fsdp_config.")
    flags = section.get("fsdp") or []
    names = [flags] if isinstance(flags, str) else list(flags)
    written = tuple(section.written("fsdp", "fsdp_config")[:1])
    read_fsdp(request, options, _fsdp_version(section), written)
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


def _load_in_bf16(request: Request) -> None:
    """Say that parameters are bf16 without masters, for optimizers that can have them so."""
    if request.keys["optim.name"].value in ("adamw", "adamw_8bit", "adamw_4bit"):
        why = "axolotl loads the weights in bf16, and nothing keeps them in fp32"
        request.keys["optim.master_weights"] = Asked(False, why=why)
        request.keys.pop("optim.implementation", None)


def _read_adapter(request: Request, section: Section) -> None:
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


def _check_sharded_quantised(request: Request, section: Section) -> None:
    """Report weights in 4 bits that the tool's sharding leaves whole on each rank."""
    storage = (section.get("bnb_config_kwargs") or {}).get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        return
    sharded = request.strategy.value in ("zero3", "fsdp", "fsdp_zero2", "hybrid")
    if sharded and request.strategy.value == "zero3":
        request.find(
            "contradiction",
            [*section.written("load_in_4bit"), *request.strategy.written],
            "ZeRO stage 3 shards floating-point weights, and those in 4 bits are stored as uint8, "
            "whole on each rank",
            "Write bnb_config_kwargs: {bnb_4bit_quant_storage: bfloat16}, or use stage 2.",
        )


def _read_loss(request: Request, section: Section) -> None:
    plugins = [str(each) for each in section.get("plugins") or []]
    on = [key for key in _CHUNKING if section.is_on(key)]
    cut = any(each.endswith("CutCrossEntropyPlugin") for each in plugins)
    if on or cut:
        written = tuple(section.written(*on, *(("plugins",) if cut else ())))
        request.keys["model.chunked_loss"] = Asked(True, written)
    else:
        why = "whole logits, as transformers computes the loss"
        request.keys["model.chunked_loss"] = Asked(False, why=why)
    others = [each for each in plugins if not each.endswith("CutCrossEntropyPlugin")]
    others = [each for each in others if not (each.endswith("LigerPlugin") and on)]
    if others:
        request.find(
            "not forecast",
            section.written("plugins"),
            f"{', '.join(each.rpartition('.')[2] for each in others)}: what it changes is not known",
            "Measure it.",
        )
    if section.is_on("eager_attention") or section.get("attn_implementation") == "eager":
        written = tuple(section.written("eager_attention", "attn_implementation"))
        request.keys["model.args.attn_implementation"] = Asked("eager", written)
