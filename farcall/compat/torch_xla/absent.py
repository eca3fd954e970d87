"""Names of ``torch_xla`` for XLA's own compiler, kernels and processes, which do not exist here.

Programs and libraries import many that they never call. So each can be imported, and raises an error that
says what to use when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

__all__ = ["absent"]

_COMPILER: Final = (
    "there is no compiler here, whose text it is: print spmd.report() for what workers had to move"
)
_ATTENTION: Final = "it is a TPU's kernel: use torch.nn.functional.scaled_dot_product_attention"
_REPLICAS: Final = (
    "in SPMD mode there is one process, with one replica: say with mark_sharding how tensors are sharded, "
    "and what workers must exchange follows"
)
_QUANTIZED: Final = "it is a TPU's kernel: compute with tensors that are not quantized"

_WHY: Final[dict[str, dict[str, str]]] = {
    "torch_xla": {
        "save_as_stablehlo": _COMPILER,
        "save_torch_model_as_stablehlo": _COMPILER,
        "set_custom_compile_options": _COMPILER,
    },
    "torch_xla._XLAC": {
        "_get_xla_tensors_bytecode": _COMPILER,
        "_get_xla_tensors_dot": _COMPILER,
        "_get_xla_tensors_hlo": _COMPILER,
        "_get_xla_tensors_text": _COMPILER,
        "_xla_spmd_all_reduce": _REPLICAS,
        "_xla_spmd_reduce_scatter": _REPLICAS,
    },
    "torch_xla.core.xla_builder": dict.fromkeys(
        ("Op", "call_jax", "create_computation", "create_builder", "mkparam"), _COMPILER
    ),
    "torch_xla.core.xla_model": {
        **dict.fromkeys(
            ("all_gather_bucketized", "collective_permute", "recv", "reduce_scatter_bucketized", "send"),
            _REPLICAS,
        ),
        **dict.fromkeys(("get_stablehlo", "get_stablehlo_bytecode"), _COMPILER),
    },
    "torch_xla.distributed.parallel_loader": {
        "ParallelLoader": "it is for several devices in one process: use MpDeviceLoader",
    },
    "torch_xla.experimental.custom_kernel": {
        **dict.fromkeys(
            (
                "FlashAttention",
                "flash_attention",
                "multi_queries_paged_attention",
                "paged_attention",
                "ragged_paged_attention",
            ),
            _ATTENTION,
        ),
        **dict.fromkeys(("GMM", "gmm", "tgmm"), "it is a TPU's kernel: use torch.matmul for each group"),
        "jax_import_guard": _COMPILER,
    },
    "torch_xla.experimental.splash_attention": dict.fromkeys(
        ("SplashAttention", "SplashAttentionConfig", "splash_attention"), _ATTENTION
    ),
    "torch_xla.experimental.xla_quantized_matmul": dict.fromkeys(
        ("XlaQuantizedLinear", "quantized_matmul"), _QUANTIZED
    ),
    "torch_xla.stablehlo": dict.fromkeys(
        ("exported_program_to_stablehlo", "save_as_stablehlo", "save_torch_model_as_stablehlo"), _COMPILER
    ),
}


def absent(module: str) -> dict[str, Any]:
    """Used in a lent module in place of names that do not exist here."""
    return {name: _stand_in(f"{module}.{name}", why) for name, why in _WHY.get(module, {}).items()}


def _stand_in(name: str, why: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} does not exist in farcall: {why}")

    if name.rpartition(".")[2][0].isupper():
        return type(name.rpartition(".")[2], (), {"__init__": refuse})
    made: Callable[..., NoReturn] = refuse
    return made
