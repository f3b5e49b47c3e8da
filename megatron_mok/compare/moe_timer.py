"""Time that training steps spend in MoE layers, forward and backward, any dispatcher.

An autograd function that returns its input sits at the entry and at the exit of every MoELayer and
notes the time in its forward and in its backward.
"""

import time

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer


class MoETimer:
    """Times all MoE layers of a model; `take()` gives the seconds since the last call.

    Marks are CUDA events on the current stream, or host times on CPU ranks. What runs inside a
    layer's backward, such as its recomputation, counts as its backward.

    Args:
        model_chunks: the list of model chunks of this rank.
        on_gpu: whether the model runs on CUDA.
    """

    def __init__(self, model_chunks, on_gpu: bool):
        self._on_gpu = on_gpu
        self._marks = []  # begin, end, begin, end, ...: layers do not nest
        for chunk in model_chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    module.register_forward_pre_hook(self._entry)
                    module.register_forward_hook(self._exit)

    def take(self) -> float:
        """Seconds in MoE layers since the last call. On CUDA, waits for the last mark."""
        marks, self._marks = self._marks, []
        if not self._on_gpu:
            return sum(end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True))
        if marks:
            marks[-1].synchronize()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return sum(begin.elapsed_time(end) for begin, end in pairs) * 1e-3

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _entry(self, module, args):
        hidden_SBH, *rest = args
        return (_Mark.apply(hidden_SBH, self._mark), *rest)

    def _exit(self, module, args, result):
        output_SBH, *rest = result
        return (_Mark.apply(output_SBH, self._mark), *rest)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mark):
        mark()
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.mark()
        return grad, None
