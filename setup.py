"""Packaging: one import name, `bigtrain`; strategies/ and configs/ reach it through links."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
HUB = ["transformers>=5.20", "tokenizers", "huggingface_hub", "safetensors", "peft", "torchao", "timm"]
"""Models of the Hugging Face Hub and of timm, their tokenizers, and adapters."""

for link in ("strategies", "configs"):
    if not (ROOT / "bigtrain" / link).is_dir():
        raise SystemExit(
            f"bigtrain/{link} is not a link to ../{link}: this checkout was made without symbolic "
            "links. Run: git config core.symlinks true && git checkout -- bigtrain"
        )

setup(
    name="bigtrain",
    version="0.1.0",
    description="Name a strategy; the same model trains to the same numbers in less memory.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir={"": "."},
    packages=[
        "bigtrain",
        "bigtrain.activations",
        "bigtrain.assembly",
        "bigtrain.checkpoint",
        "bigtrain.checkpoint.foreign",
        "bigtrain.compare",
        "bigtrain.configs",
        "bigtrain.configs.clusters",
        "bigtrain.configs.jobs",
        "bigtrain.configs.strategies",
        "bigtrain.core",
        "bigtrain.costs",
        "bigtrain.cutting",
        "bigtrain.data",
        "bigtrain.doctor",
        "bigtrain.engine",
        "bigtrain.engine.alongside",
        "bigtrain.engine.run_loss",
        "bigtrain.files",
        "bigtrain.hub",
        "bigtrain.hvd",
        "bigtrain.hvd.elastic",
        "bigtrain.job",
        "bigtrain.losses",
        "bigtrain.machine",
        "bigtrain.memory",
        "bigtrain.models",
        "bigtrain.optim",
        "bigtrain.own_loop",
        "bigtrain.pipeline",
        "bigtrain.planner",
        "bigtrain.prediction",
        "bigtrain.prediction.fake_runs",
        "bigtrain.ranks",
        "bigtrain.recorder",
        "bigtrain.report",
        "bigtrain.schedules",
        "bigtrain.slice_planning",
        "bigtrain.slicing",
        "bigtrain.slicing.rules",
        "bigtrain.speedup",
        "bigtrain.strategies",
        "bigtrain.strategies.local_sgd",
        "bigtrain.strategies.parameter_server",
        "bigtrain.strategies.pipeline",
        "bigtrain.strategies.zero",
        "bigtrain.strategies.zero.on_deepspeed",
        "bigtrain.strategies.zero.on_fairscale",
        "bigtrain.strategies.zero.on_torch",
        "bigtrain.tensors",
        "bigtrain.timing",
        "bigtrain.tracing",
        "bigtrain.verify",
        "bigtrain.versions",
    ],
    package_data={
        "bigtrain": ["py.typed"],
        "bigtrain.configs": ["*.yaml"],
        "bigtrain.configs.clusters": ["*.yaml"],
        "bigtrain.configs.jobs": ["*.yaml"],
        "bigtrain.configs.strategies": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.11,<2.16",
        "torchvision",
        # Those that their adapters in strategies/ name; a test compares them.
        "deepspeed>=0.19.8,<0.19.9",
        "fairscale>=0.4.9,<0.4.14",
        "pyyaml",
        "pydantic>=2.7",
        "matplotlib",
        "rich",
        "safetensors",
        "xxhash",
        "numpy",
    ],
    extras_require={
        "digits": ["scikit-learn"],
        "tensorboard": ["tensorboard"],
        "lowbit": ["torchao"],
        "hub": HUB,
        "dev": [
            "build",
            "codespell",
            "mypy",
            "playwright",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "scikit-learn",
            "setuptools>=77",
            "tensorboard",
            "torchao",
            "types-PyYAML",
            *HUB,
        ],
    },
    entry_points={"console_scripts": ["bigtrain = bigtrain.cli:main"]},
)
