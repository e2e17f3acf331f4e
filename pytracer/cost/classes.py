"""Sorts operators into classes by name.

A contraction has a FLOP formula. A normalisation reduces and then maps. An element-wise operator only
maps. Data movement computes nothing. Pure reductions are "other", so that the classes add up to the
whole.
"""

import functools
import re
from collections.abc import Callable

import torch
from torch.utils import flop_counter


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONTRACTIONS = _names(
    """mm addmm bmm baddbmm addbmm mv addmv dot vdot _scaled_mm _grouped_mm convolution
    _convolution convolution_backward cudnn_convolution mkldnn_convolution
    convolution_overrideable _slow_conv2d_forward _trilinear mkldnn_linear
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _flash_attention_forward
    _flash_attention_backward _efficient_attention_forward _efficient_attention_backward
    _cudnn_attention_forward _cudnn_attention_backward
    _cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward"""
)

NORMALISATIONS = _names(
    """native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    _native_batch_norm_legit _batch_norm_with_update batch_norm_backward
    native_group_norm native_group_norm_backward _softmax _softmax_backward_data _log_softmax
    _log_softmax_backward_data nll_loss_forward nll_loss_backward nll_loss2d_forward
    nll_loss2d_backward"""
)

ELEMENT_WISE = _names(
    """native_dropout native_dropout_backward _fused_dropout bernoulli_ normal_ uniform_ random_
    leaky_relu_backward hardswish_backward hardtanh_backward mse_loss mse_loss_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    masked_fill_ glu glu_backward prelu _prelu_kernel _prelu_kernel_backward"""
)

DATA_MOVEMENT = _names(
    """copy_ clone cat stack index index_put_ _index_put_impl_ index_select index_add_ gather
    scatter scatter_ scatter_add scatter_add_ embedding embedding_dense_backward fill_ zero_
    constant_pad_nd roll flip repeat_interleave masked_select nonzero im2col col2im
    upsample_nearest2d upsample_bilinear2d _index_put"""
)

REDUCTIONS = _names(
    """sum mean amax amin argmax argmin max min any all norm linalg_vector_norm var std var_mean
    prod cumsum logsumexp _logcumsumexp topk sort adaptive_avg_pool2d _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward"""
)

_FREE = _names(
    """empty empty_like empty_strided resize_ set_ item _local_scalar_dense detach detach_
    lift_fresh _unsafe_view _reshape_alias"""
)
_COMMUNICATION = re.compile(r"^(c10d::|_c10d_functional::|nccl|gloo:|record_param_comms)|ncclDev")


@functools.cache
def class_of(op: str) -> str | None:
    """The operator's class, or None for an unknown name."""
    if _COMMUNICATION.search(op):
        return "communication"
    if op.startswith("triton_"):
        return _class_of_fused(op)
    name = op.removeprefix("aten::")
    if name == op:
        return "contraction" if registered_formula(op) is not None else None
    for members, class_name in (
        (CONTRACTIONS, "contraction"),
        (NORMALISATIONS, "normalisation"),
        (ELEMENT_WISE, "element-wise"),
        (DATA_MOVEMENT, "data movement"),
        (REDUCTIONS, "other"),
    ):
        if name in members:
            return class_name
    if _has_tag(name, torch.Tag.pointwise) or _has_tag(name.rstrip("_"), torch.Tag.pointwise):
        return "element-wise"
    return None


def registered_formula(op: str) -> Callable[..., int] | None:
    """The FLOP formula that the program gave torch for an operator of its own."""
    library, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, library, None), name, None) if name else None
    formula: Callable[..., int] | None = flop_counter.flop_registry.get(packet)
    return formula


def _class_of_fused(kernel: str) -> str | None:
    """The class in the name of an Inductor kernel: poi(ntwise), red(uction), per(sistent)."""
    if kernel.startswith("triton_poi_"):
        return "element-wise"
    if kernel.startswith(("triton_red_", "triton_per_")):
        return "normalisation"
    if kernel.startswith(("triton_tem_", "triton_mm", "triton_bmm", "triton_flex")):
        return "contraction"
    return None


def is_reduction(op: str) -> bool:
    """Whether the operator only reduces, as a sum does."""
    return op.removeprefix("aten::") in REDUCTIONS


@functools.cache
def computes_nothing(op: str) -> bool:
    """Whether the operator only makes a view or allocates, so it has no FLOPs and moves no bytes."""
    name = op.removeprefix("aten::")
    if name in _FREE:
        return True
    packet = getattr(torch.ops.aten, name, None) if name != op else None
    if packet is None:
        return False
    try:
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    except AttributeError:
        return False
    return any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for schema in schemas
        for returned in schema.returns
    )


def _has_tag(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name else None
    if packet is None or not hasattr(packet, "overloads"):
        return False
    return any(tag in getattr(packet, overload).tags for overload in packet.overloads())
