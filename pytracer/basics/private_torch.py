"""Every private name of torch that our Python uses, in one place.

torch may rename or drop any of these in a release. `pytracer doctor` looks all of them up and says
what a missing one stops. A name is looked up when it is first used, so one that is missing stops
nothing else. `csrc/torch/private_torch.h` is the same for our C++.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pytracer import errors

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException as DataDependentOutputException,
        DynamicOutputShapeException as DynamicOutputShapeException,
        FakeTensor as FakeTensor,
        FakeTensorMode as FakeTensorMode,
        UnsupportedOperatorException as UnsupportedOperatorException,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

active_mode: Callable[[Any], Any]
attention_order: Callable[[], list[int]]
backend_failed: type[Exception]
backward_pass_number: Callable[[], int]
backward_runner: Callable[..., Any]
bindings: Any
code_generator: Any
collectives: Any
default_store: Callable[[], Any]
device_mesh: Any
dispatch_keys: Any
dynamo_limits: Any
constant_folder: Any
device_interfaces: Any
dynamo_failed: type[Exception]
dynamo_functions: Any
dynamo_graph: Any
dynamo_optimizer: Any
dynamo_rules: Any
fake_tensors: Any
frame_converter: Any
frame_not_compiled: Callable[[], Any]
functorch_settings: Any
guards: Any
inductor: Any
inductor_kernels: Any
inductor_modules: Any
inductor_scheduler: Any
inductor_settings: Any
inductor_utils: Any
padding: Any
flight_recorder: Callable[[], bytes]
foreach_types_of_norms: list[Any]
foreach_types_of_optimizers: list[Any]
functorch: Any
group_registry: Any
inductor_state: Any
has_kernel: Callable[[str, str], bool]
higher_order: type
higher_order_shapes: dict[Any, Callable[..., Any]]
mode_keys: Any
multiply_fp8: Callable[..., Any]
multiply_int8: Callable[..., Any]
nccl_flight_recorder: Callable[[], bytes]
norm_over_ranks: Any
operator_overload: Any
process_groups: Any
profiler_is_on: Callable[[], bool]
python_function: type
read_buckets: Callable[[Any], dict[str, Any]]
broadcast_coalesced: Any
reducer: Any
reducers_log: Any
sharded_parameter: Any
subclasses: Any
top_saved_hooks: Callable[[bool], Any]
tree_iter: Callable[[Any], Any]
tree_map: Callable[..., Any]
triton_facts: Any
triton_heuristics: Any
wait_on_gpu: Callable[[int], None]
work_of_future: Callable[[Any], Any]
without_modes: Callable[[], Any]
without_torch_function: Callable[[], Any]


class Private(NamedTuple):
    """A private name of torch: `place` is `module:attribute`."""

    place: str
    used_for: str
    is_new: bool = False  # tested releases of torch may lack it

    def find(self) -> Any:
        """The object.

        Raises:
            errors.CaptureError: this torch does not have it.
        """
        module, _, path = self.place.partition(":")
        try:
            found = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            raise errors.CaptureError(
                f"this torch has no {self.place.replace(':', '.').rstrip('.')}, which {self.used_for} "
                "needs; use a torch that `pytracer doctor` calls tested"
            ) from None
        return found


DYNAMO, INDUCTOR = "torch._dynamo.convert_frame", "torch._inductor.compile_fx"
_IMAGINE = "imagine()"
_FAKE = "torch._subclasses.fake_tensor"
_COMPILED = "knowing what compiled code holds"
_FOLLOW = "following torch.compile in imagine()"
_GEMM = "pytracer gemm"
_GRAPHS = "reading what autograd saved"
_GROUPS = "knowing the groups of a job's ranks"
_COLLECTIVES = "listing a job's collectives"

# By the name that our modules use.
NAMES = {
    "active_mode": Private("torch._C:_get_dispatch_mode", _IMAGINE),
    "annotate_memory": Private(
        "torch.cuda.memory:_annotate_memory", "annotate_memory_history()", is_new=True
    ),
    "attention_order": Private("torch._C:_get_sdp_priority_order", _IMAGINE),
    "backward_pass_number": Private("torch._C:_current_graph_task_id", _IMAGINE),
    "backward_runner": Private("torch.autograd.graph:_engine_run_backward", _IMAGINE),
    "default_store": Private(
        "torch.distributed.distributed_c10d:_get_default_store", "comparing the clocks of hosts"
    ),
    "bindings": Private("torch._C:", _IMAGINE),
    "code_generator": Private("torchgen:", _IMAGINE),
    "collectives": Private("torch:ops._c10d_functional", _IMAGINE),
    "device_mesh": Private("torch.distributed.device_mesh:DeviceMesh", _IMAGINE),
    "dispatch_keys": Private("torch._C:DispatchKey", _IMAGINE),
    "dynamo_limits": Private("torch._dynamo.config:", _GEMM),
    "fake_tensors": Private(f"{_FAKE}:", _IMAGINE),
    "flight_recorder": Private(
        "torch._C._distributed_c10d:_dump_fr_trace_json", _COLLECTIVES, is_new=True
    ),
    "foreach_types_of_norms": Private(
        "torch.utils._foreach_utils:_foreach_supported_types", _IMAGINE
    ),
    "foreach_types_of_optimizers": Private(
        "torch.optim.optimizer:_foreach_supported_types", _IMAGINE
    ),
    "functorch": Private("torch._C:_functorch", _GRAPHS),
    "group_registry": Private("torch.distributed.distributed_c10d:_world", _GROUPS),
    "has_kernel": Private("torch._C:_dispatch_has_kernel_for_dispatch_key", _IMAGINE),
    "higher_order": Private("torch._ops:HigherOrderOperator", _IMAGINE),
    "higher_order_shapes": Private(
        "torch._higher_order_ops.utils:registered_hop_fake_fns", _IMAGINE
    ),
    "backend_failed": Private("torch._dynamo.exc:ShortenTraceback", _FOLLOW, is_new=True),
    "constant_folder": Private(
        "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder", _FOLLOW, is_new=True
    ),
    "device_interfaces": Private("torch._dynamo.device_interface:", _FOLLOW, is_new=True),
    "dynamo_failed": Private("torch._dynamo.exc:InternalTorchDynamoError", _FOLLOW, is_new=True),
    "dynamo_functions": Private(
        "torch._dynamo.variables.torch:TorchInGraphFunctionVariable", _FOLLOW, is_new=True
    ),
    "dynamo_optimizer": Private(
        "torch._dynamo.variables.optimizer:OptimizerVariable", _FOLLOW, is_new=True
    ),
    "dynamo_rules": Private("torch._dynamo.trace_rules:", _FOLLOW, is_new=True),
    "dynamo_graph": Private("torch._dynamo.output_graph:OutputGraph", _FOLLOW, is_new=True),
    "frame_converter": Private(f"{DYNAMO}:CatchErrorsWrapper", _FOLLOW, is_new=True),
    "frame_not_compiled": Private("torch._dynamo.types:ConvertFrameReturn", _FOLLOW, is_new=True),
    "functorch_settings": Private("torch._functorch.config:", _FOLLOW, is_new=True),
    "guards": Private("torch._C._dynamo:guards", _FOLLOW, is_new=True),
    "inductor": Private(f"{INDUCTOR}:", _FOLLOW, is_new=True),
    "inductor_kernels": Private("torch._inductor.async_compile:AsyncCompile", _FOLLOW, is_new=True),
    "inductor_modules": Private("torch._inductor.codecache:PyCodeCache", _FOLLOW, is_new=True),
    "inductor_scheduler": Private("torch._inductor.scheduler:", _FOLLOW, is_new=True),
    "inductor_settings": Private("torch._inductor.config:", _FOLLOW, is_new=True),
    "inductor_state": Private("torch._inductor.virtualized:V", _COMPILED),
    "inductor_utils": Private("torch._inductor.utils:", _FOLLOW, is_new=True),
    "padding": Private("torch._inductor.fx_passes.pad_mm:", _FOLLOW, is_new=True),
    "mode_keys": Private("torch._C:_TorchDispatchModeKey", _IMAGINE),
    "multiply_fp8": Private("torch:_scaled_mm", _GEMM),
    "multiply_int8": Private("torch:_int_mm", _GEMM),
    # Only a torch that was built with NCCL has it.
    "nccl_flight_recorder": Private(
        "torch._C._distributed_c10d:_dump_nccl_trace_json", _COLLECTIVES, is_new=True
    ),
    "norm_over_ranks": Private("torch.nn.modules._functions:", _IMAGINE),
    "operator_overload": Private("torch._ops:OpOverload", _COMPILED),
    "process_groups": Private("torch.distributed.distributed_c10d:", _IMAGINE),
    "profiler_is_on": Private("torch._C._autograd:_profiler_enabled", "trace(cost=True)"),
    "python_function": Private("torch._C:_FunctionBase", _GRAPHS),
    "read_buckets": Private(
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
        "recognizing DistributedDataParallel's buckets",
    ),
    "broadcast_coalesced": Private("torch.distributed:_broadcast_coalesced", _IMAGINE),
    "reducer": Private("torch.distributed:Reducer", _IMAGINE),
    "reducers_log": Private("torch.distributed:Logger", _IMAGINE),
    "sharded_parameter": Private(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam", _IMAGINE
    ),
    "subclasses": Private("torch._subclasses:", _IMAGINE),
    "top_saved_hooks": Private("torch._C._autograd:_top_saved_tensors_default_hooks", _IMAGINE),
    "tree_iter": Private("torch.utils._pytree:tree_iter", _IMAGINE),
    "tree_map": Private("torch.utils._pytree:tree_map", _IMAGINE),
    "triton_facts": Private("torch.utils._triton:", _FOLLOW, is_new=True),
    "triton_heuristics": Private(
        "torch._inductor.runtime.triton_heuristics:", _FOLLOW, is_new=True
    ),
    "wait_on_gpu": Private("torch.cuda:_sleep", _GEMM),
    "work_of_future": Private("torch._C._distributed_c10d:_create_work_from_future", _IMAGINE),
    "without_modes": Private("torch.utils._python_dispatch:_disable_current_modes", _IMAGINE),
    "without_torch_function": Private("torch._C:DisableTorchFunctionSubclass", _GRAPHS),
    "DataDependentOutputException": Private(f"{_FAKE}:DataDependentOutputException", _IMAGINE),
    "DynamicOutputShapeException": Private(f"{_FAKE}:DynamicOutputShapeException", _IMAGINE),
    "FakeStore": Private("torch.testing._internal.distributed.fake_pg:FakeStore", _IMAGINE),
    "FakeTensor": Private(f"{_FAKE}:FakeTensor", _IMAGINE),
    "FakeTensorMode": Private(f"{_FAKE}:FakeTensorMode", _IMAGINE),
    "TorchDispatchMode": Private("torch.utils._python_dispatch:TorchDispatchMode", _IMAGINE),
    "UnsupportedOperatorException": Private(f"{_FAKE}:UnsupportedOperatorException", _IMAGINE),
}
# Private members that our modules use on an object of torch's, or replace for an imagined run.
MEMBERS = (
    Private("torch:Tensor._version", "offload()"),
    # To look for these two imports the whole compiler. Without them, less is known of its code.
    Private("torch._inductor.codecache:PyCodeCache.linemaps", _COMPILED, is_new=True),
    Private("torch._inductor.graph:GraphLowering.save_output_code", _COMPILED, is_new=True),
    Private("torch.amp:GradScaler._maybe_opt_step", _IMAGINE),
    Private("torch.cuda:_is_in_bad_fork", _IMAGINE),
    Private("torch.cuda:_lazy_call", _IMAGINE),
    Private("torch.cuda:_lazy_init", _IMAGINE),
    Private("torch.distributed:_verify_params_across_processes", _IMAGINE),
    Private("torch.distributed:Reducer._rebuild_buckets", _IMAGINE),
    Private("torch.distributed.distributed_c10d:_get_default_timeout", _IMAGINE),
    Private("torch.distributed.distributed_c10d:_new_process_group_helper", _IMAGINE),
    Private("torch.distributed.tensor:DTensor._local_tensor", _IMAGINE),
    Private("torch.library:Library._destroy", _IMAGINE),
    Private("torch.nn:Module._apply", _IMAGINE),
    Private("torch.nn.init:_no_grad_trunc_normal_", _IMAGINE),
    Private("torch._C:_conv_determine_backend_memory_format", _IMAGINE),
    Private("torch._subclasses.fake_tensor:init_gpu_context", _IMAGINE),
    Private("torch:ops.aten.add.Tensor._dispatch_cache", _IMAGINE),
    Private("torch:ops.aten.add.Tensor._op_dk", _IMAGINE),
    Private("torch:ops.aten.add.Tensor._schema", "trace(cost=True)"),
)


def __getattr__(name: str) -> Any:
    """Looks a name up in torch, once."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = NAMES[name].find()
    return found


def of_this_rank(tensor: Any) -> Any:
    """What this rank has of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def missing() -> list[str]:
    """A sentence for each name that this torch should have and does not."""
    wanted = [one for one in (*NAMES.values(), *MEMBERS) if not one.is_new]
    return [sentence for sentence in map(_problem, wanted) if sentence]


def _problem(private: Private) -> str:
    try:
        private.find()
    except errors.CaptureError as error:
        return str(error)
    return ""
