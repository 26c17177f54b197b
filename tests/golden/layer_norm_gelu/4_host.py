"""layer_norm_gelu: the host program that hotloop generated; `build(rt)` gives the callable."""

import torch
from torch import device


def build(rt):
    empty = rt.empty
    pooled = rt.pooled
    cpp_red_native_layer_norm_gelu_0 = rt.kernel('cpp_red_native_layer_norm_gelu_0')

    def call(args):
        in0, in1, in2 = args
        b16 = pooled((512, 768), (768, 1), torch.float32, 1572864)
        cpp_red_native_layer_norm_gelu_0(in0.data_ptr(), in2.data_ptr(), in1.data_ptr(), b16.data_ptr())
        return [b16]

    return call
