"""What Megatron-Bridge's benchmark scripts set in a recipe, for all benchmarks and by their options.

``scripts/performance`` of August 2026: ``utils/overrides.py`` (``set_user_overrides``) has one or more fields for an
option of ``argument_parser.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from ...plan.errors import Node, Origin, PlanError
from .overrides import laid_over
from .table import PRECISIONS

SCRIPTS = ("setup_experiment", "custom_setup_experiment", "run_script")
"""``setup_experiment.py`` (Google's recipes for GPUs have a copy of it) starts ``run_script.py``, which has the same
options, on every rank."""
_TRUE = ("true", "1", "t", "yes", "y")
_FSDP = (
    "ddp.use_megatron_fsdp=true",
    "ddp.data_parallel_sharding_strategy=optim_grads_params",
    "ddp.keep_fp8_transpose_cache=false",
    "ddp.average_in_collective=false",
    "model.init_model_with_meta_device=true",
    "model.gradient_accumulation_fusion=true",
)
_EXCHANGE_BEHIND = (
    "comm_overlap.overlap_moe_expert_parallel_comm=true",
    "comm_overlap.delay_wgrad_compute=true",
    "model.moe_shared_expert_overlap=false",
)
_CAPACITY = ("model.moe_expert_capacity_factor=1.0", "model.moe_pad_expert_input_to_capacity=true")


def _when_true(*words: str) -> Callable[[str], tuple[str, ...]]:
    return lambda said: words if said.lower() in _TRUE else ()


def _field(path: str) -> Callable[[str], tuple[str, ...]]:
    return lambda said: (f"{path}={said}",)


def _listed(said: str) -> str:
    return f"[{said.strip('[]')}]"


def _tensor_parallel(said: str) -> tuple[str, ...]:
    parallel = "true" if said.isdecimal() and int(said) > 1 else "false"
    return f"model.tensor_model_parallel_size={said}", f"model.sequence_parallel={parallel}"


def _virtual_stages(said: str) -> tuple[str, ...]:
    field = "model.virtual_pipeline_model_parallel_size"
    return () if said == "-1" else (f"{field}={'null' if said == 'None' else said}",)


def _whole_layers(said: str) -> tuple[str, ...]:
    return (
        "model.recompute_granularity=full",
        "model.recompute_method=block",
        f"model.recompute_num_layers={said}",
    )


def _modules(said: str) -> tuple[str, ...]:
    return f"model.recompute_modules={_listed(said)}", "model.recompute_granularity=selective"


def _on_the_host(said: str) -> tuple[str, ...]:
    offload = ("model.cpu_offloading=true", "model.cpu_offloading_weights=false")
    return (*offload, f"model.cpu_offloading_num_layers={said}") if said != "0" else ()


def _dispatcher(said: str) -> tuple[str, ...]:
    if said == "None":
        return ("model.moe_token_dispatcher_type=alltoall",)
    return (
        "model.moe_token_dispatcher_type=flex",
        f"model.moe_flex_dispatcher_backend={said}",
        "model.moe_shared_expert_overlap=false",
    )


def _graph_of(said: str) -> tuple[str, ...]:
    if "full_iteration" in said:
        return (
            "model.cuda_graph_impl=local",
            "model.cuda_graph_scope=full_iteration",
            "rerun_state_machine.check_for_nan_in_loss=false",
            "ddp.check_for_nan_in_grad=false",
        )
    return (f"model.cuda_graph_scope={_listed(said)}",)


_SETS: dict[str, Callable[[str], tuple[str, ...]]] = {
    **dict.fromkeys(("-tp", "--tensor_model_parallel_size"), _tensor_parallel),
    **dict.fromkeys(("-vp", "--virtual_pipeline_model_parallel_size"), _virtual_stages),
    **dict.fromkeys(("-rl", "--recompute_num_layers"), _whole_layers),
    "--recompute_modules": _modules,
    **dict.fromkeys(("-ol", "--activation_offload_layers"), _on_the_host),
    "--use_megatron_fsdp": _when_true(*_FSDP),
    "--nccl_ub": _when_true("ddp.nccl_ub=true"),
    "--moe_a2a_overlap": _when_true(*_EXCHANGE_BEHIND),
    "--use_tokendrop": _when_true(*_CAPACITY),
    "--moe_flex_dispatcher_backend": _dispatcher,
    "--cuda_graph_impl": _field("model.cuda_graph_impl"),
    "--cuda_graph_scope": _graph_of,
    "--num_layers": _field("model.num_layers"),
    "--hidden_size": _field("model.hidden_size"),
    "--num_moe_experts": _field("model.num_moe_experts"),
    "--pipeline_model_parallel_layout": _field("model.pipeline_model_parallel_layout"),
}
_NOT_READ = ("--first_k_dense_replace",)
NAMES = frozenset((*_SETS, *_NOT_READ))


def overrides_of(option: str, said: str, origin: Origin) -> tuple[str, ...]:
    """The overrides that ``option`` with the value ``said`` stands for."""
    if option in _NOT_READ:
        raise PlanError(option, said, "is not read; --model names a model with so many dense layers", origin=origin)
    return _SETS[option](said)


_COMMON = (
    "ddp.grad_reduce_in_fp32=false",
    "ddp.check_for_nan_in_grad=false",
    "rerun_state_machine.check_for_nan_in_loss=false",
    "model.cross_entropy_loss_fusion=true",
)
_NAMES = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
"""What the scripts call precisions (``scripts/performance/utils/utils.py``)."""
_ALL_LAYERS = ("fp8_cs", "fp8_ds")
"""Those whose first and last layers are in 8 bits, too (``_perf_precision``)."""


def common(root: Node, recipe: str, origin: Origin) -> Node:
    """``root`` over what every recipe of ``perf_recipes`` has (``_common.py``: ``_benchmark_common``): gradients are
    reduced in bf16, and the loss is Transformer Engine's, but for hybrids' and GLM 5's."""
    loss = "native" if recipe.startswith(("nemotron", "glm")) else "te"
    words = (f"model.cross_entropy_fusion_impl={loss}", *_COMMON)
    given = {f"{section}.{field}" for section in root.mapping for field in root.mapping[section].mapping}
    return laid_over(root, [word for word in words if word.partition("=")[0] not in given], origin)


def precision(root: Node, dtype: str, origin: Origin, *, library: bool) -> Node:
    """``root`` with the precision that the scripts call ``dtype``, where no override says another; recipes of the
    ``library`` (``--use_recipes``) have it as its name says."""
    if dtype not in _NAMES or "mixed_precision" in root.mapping:
        return root
    if library:
        return root.with_items({"mixed_precision": Node(_NAMES[dtype], origin)})
    fields = {**PRECISIONS[_NAMES[dtype]], "grad_reduce_in_fp32": False}
    if dtype in _ALL_LAYERS:
        fields["first_last_layers_bf16"] = False
    said = {name: Node(one, origin) for name, one in fields.items() if isinstance(one, (bool, int, str))}
    return root.with_items({"mixed_precision": Node(said, origin)})
