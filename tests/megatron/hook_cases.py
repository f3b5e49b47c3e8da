"""Rank side: how the fused layer is wired into modules, hooks, names and arguments."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import logging
import re
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core
import torch
import yaml
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.modules.module import register_module_forward_pre_hook

from megatron_mok.megatron import MoKOptions, install, set_options, validation
from megatron_mok.megatron.errors import MoKConfigError
from megatron_mok.megatron.flags import get_options
from megatron_mok.megatron.layer import FusedMoELayer
from megatron_mok.megatron.rules import ARGS_REFUSALS, CONFIG_REFUSALS
from megatron_mok.megatron.spec import with_mok
from tests.megatron.layer_cases import pair, relative_difference, run_layer
from tests.megatron.moe_cases import make_config, make_layer, set_up_parallel

SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True}


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the MoKConfigError that the call raises, '' when it raises none."""
    try:
        function(*args, **kwargs)
    except MoKConfigError as error:
        return str(error)
    return ""


def installs_once() -> bool:
    """Whether a second install() leaves the hooks of the first alone."""
    hooks = MoELayer.__new__, TransformerConfig.__post_init__
    install()
    return hooks == (MoELayer.__new__, TransformerConfig.__post_init__)


def _parser() -> argparse.ArgumentParser:
    from megatron.training import arguments

    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def known_flags() -> list[str]:
    """All flags of Megatron's parser, with MoK's."""
    return list(_parser()._option_string_actions)


def unknown_flags() -> list[str]:
    """Flags that Megatron's parser does not have, in messages about settings that it has."""
    set_up_parallel(1)
    parser = _parser()
    known = set(parser._option_string_actions)
    settings = set(vars(make_config("alltoall"))) | set(vars(parser.parse_args([])))
    texts = [
        f"{rule.reason} {rule.way_out}"
        for rule in CONFIG_REFUSALS + ARGS_REFUSALS
        if rule.name in settings
    ]
    named = {flag for text in texts for flag in re.findall(r"--[a-z0-9-]+", text)}
    return sorted(named - known)


def unknown_fields() -> list[str]:
    """Fields that the validation looks at and TransformerConfig does not have."""
    set_up_parallel(1)
    return sorted({rule.name for rule in CONFIG_REFUSALS} - set(vars(make_config("alltoall"))))


def megatron_version() -> str:
    return megatron.core.__version__


def names() -> bool:
    """Whether parameters, buffers and state dicts have native names, in native order."""
    set_up_parallel(2)
    native, fused = pair(**SHARED)
    assert list(native.state_dict()) == list(fused.state_dict())
    assert type(copy.copy(native)) is MoELayer
    assert type(copy.copy(fused)) is FusedMoELayer
    keys = [
        [(k, getattr(v, "key", None)) for k, v in layer.sharded_state_dict("mlp.").items()]
        for layer in (native, fused)
    ]
    assert keys[0] == keys[1]
    for kind in ("named_parameters", "named_buffers"):
        lists = [[n for n, _ in getattr(layer, kind)()] for layer in (native, fused)]
        assert lists[0] == lists[1]
    return True


def uncovered_parameters() -> list[str]:
    """Parameters that no called module holds: a forward pre-hook, DDP's way, would not see them."""
    set_up_parallel(2)
    layer = make_layer(make_config("mok", **SHARED))
    seen: set[int] = set()
    handle = register_module_forward_pre_hook(
        lambda module, _: seen.update(id(p) for p in module.parameters(recurse=False))
    )
    try:
        layer(torch.randn(8, 1, 64))
    finally:
        handle.remove()
    return [name for name, p in layer.named_parameters() if id(p) not in seen]


def gradient_hooks(fusion: bool) -> dict[str, Any]:
    """Two microbatches, with and without `main_grad`, against native gradients.

    Returns: how often the gradient accumulator of each expert weight ran (a set of counts), the
    worst relative difference of accumulated gradients, and the flags `grad_added_to_main_grad`.
    """
    set_up_parallel(2)
    if fusion:
        from tests.megatron.moe_cases import use_weight_gradient_fusion_without_apex

        use_weight_gradient_fusion_without_apex()
    native, fused = pair(gradient_accumulation_fusion=False)
    if fusion:
        fused = make_layer(make_config("mok", gradient_accumulation_fusion=True))
        fused.load_state_dict(native.state_dict())
    weights = dict(fused.experts.named_parameters())
    ran: Counter[str] = Counter()
    accumulators = []
    for name, weight in weights.items():
        weight.main_grad = torch.zeros(weight.shape) if fusion else None
        weight.grad_added_to_main_grad = False
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, name=name: ran.update([name]))
        accumulators.append(accumulator)  # the hook lives as long as this reference
    for seed in (1, 2):
        for layer in (native, fused):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(16, 1, 64, generator=generator)
            layer(x)[0].sum().backward()
    expected = dict(native.experts.named_parameters())
    found = {n: w.main_grad if fusion else w.grad for n, w in weights.items()}
    dummies = [w.grad for w in weights.values() if fusion]
    assert all(g is not None and not g.any() for g in dummies)
    return {
        "runs": {ran[name] for name in weights},
        "worst": max(relative_difference(found[n], expected[n].grad) for n in weights),
        "added": {w.grad_added_to_main_grad for w in weights.values()},
    }


def frozen_experts() -> bool:
    """Whether frozen expert weights get no gradient while the others keep theirs."""
    set_up_parallel(2)
    native, fused = pair()
    for layer in (native, fused):
        layer.experts.local_experts[1].requires_grad_(False)
    expected, found = run_layer(native, 16), run_layer(fused, 16)
    assert expected["d experts.local_experts.1.linear_fc1.weight"] is None
    return all(relative_difference(found[n], expected[n]) <= 1e-5 for n in expected)


def conversions() -> float:
    """Worst difference to native in BF16 after conversions that make new Parameter objects."""
    set_up_parallel(2)
    native, fused = pair(bf16=True, params_dtype=torch.bfloat16)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        for layer in (native, fused):
            before = list(layer.experts.parameters())
            layer.float().bfloat16()
            for old, new in zip(before, layer.experts.parameters(), strict=True):
                assert old is not new
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    expected, found = run_layer(native, 16), run_layer(fused, 16)
    assert list(expected) == list(found)
    return max(relative_difference(found[n], expected[n]) for n in expected)


class Adapter(torch.nn.Module):
    """A LoRA-style wrapper around an expert linear."""

    def __init__(self, wrapped: torch.nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped


def bypasses() -> dict[str, str]:
    """What the layer says when its experts are changed after it was built."""
    set_up_parallel(2)
    config = make_config("mok")
    said = {}

    layer = make_layer(config)
    layer.experts.local_experts[1].linear_fc2 = Adapter(layer.experts.local_experts[1].linear_fc2)
    said["module"] = message_of(layer, torch.randn(4, 1, 64))

    layer = make_layer(config)
    linear = layer.experts.local_experts[0].linear_fc1
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
    said["parameter"] = message_of(layer, torch.randn(4, 1, 64))

    for kind in ("forward_pre_hook", "forward_hook", "full_backward_hook"):
        layer = make_layer(config)
        linear = layer.experts.local_experts[0].linear_fc1
        getattr(linear, f"register_{kind}")(lambda *_: None)
        said[kind] = message_of(layer, torch.randn(4, 1, 64))
    return said


def refused_layers() -> dict[str, str]:
    """What construction says about layers that the fused path cannot be."""
    set_up_parallel(2)

    class OwnLayer(MoELayer):
        pass

    said = {"subclass": message_of(OwnLayer, make_config("mok"))}
    said["shape"] = message_of(
        make_config, "mok", hidden_size=96, num_moe_experts=64, moe_router_topk=33
    )
    set_options(MoKOptions())
    said["tokens"] = message_of(lambda: make_layer(make_config("mok")))
    # As a program may do it: the config says mok only after it was checked.
    config = make_config("alltoall", moe_expert_capacity_factor=1.0)
    config.moe_token_dispatcher_type = "mok"
    set_options(MoKOptions(max_tokens_per_rank=8))
    said["late"] = message_of(make_layer, config)
    if parallel_state.get_expert_model_parallel_rank() == 0:
        name = socket.gethostname
        socket.gethostname = lambda: "elsewhere"
        try:
            said["hosts"] = message_of(lambda: make_layer(make_config("mok", num_moe_experts=4)))
        finally:
            socket.gethostname = name
    else:
        said["hosts"] = message_of(lambda: make_layer(make_config("mok", num_moe_experts=4)))
    return said


def refused_calls() -> dict[str, str]:
    """What forward says about calls that the fused layer cannot do."""
    set_up_parallel(2)
    layer = make_layer(make_config("mok"))
    x = torch.randn(97, 1, 64)
    said = {"tokens": message_of(layer, x)}
    said["partial"] = message_of(layer, x[:4], intermediate_tensors=())
    layer.fwd_execution_map = "route"
    said["map"] = message_of(layer, x[:4])
    return said


def configs(changes: list[dict[str, Any]]) -> list[str]:
    """What a TransformerConfig for mok says to each set of changes, and then holds."""
    set_up_parallel(2)
    return [message_of(make_config, "mok", **change) for change in changes]


def less_fused() -> tuple[bool, list[str]]:
    """What configs with shared-expert overlap and with recompute of the activation log, made
    twice each; and whether the first then says that the overlap is off."""
    set_up_parallel(2)
    validation._warned.clear()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    validation.logger.addHandler(handler)
    try:
        for _ in range(2):
            config = make_config("mok", moe_shared_expert_overlap=True, **SHARED)
            make_config(
                "mok",
                recompute_granularity="selective",
                recompute_modules=["moe_act"],
                moe_grouped_gemm=True,
            )
    finally:
        validation.logger.removeHandler(handler)
    assert config.moe_token_dispatcher_type == "mok"
    return not config.moe_shared_expert_overlap, said


def announcements(mode: str = "fused") -> list[str]:
    """What two layers of a shape not built before print on this rank."""
    set_up_parallel(2, mode=mode)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for _ in range(2):
            make_layer(make_config("mok", moe_ffn_hidden_size=320))
    return output.getvalue().splitlines()


def own_spec(mtp: bool, mode: str = "fused") -> dict[str, Any]:
    """Models from specs without the hook on MoELayer: kinds of MoE layers in a model of a native
    spec, of the same one `with_mok`, and of the native one again; and what a wrong config says."""
    set_up_parallel(2, mode=mode)
    changes: dict[str, Any] = {"num_layers": 1, "mtp_num_layers": 1 if mtp else None}
    spec = get_gpt_decoder_block_spec(make_config("alltoall", **changes), False)

    def kinds(dispatcher: str, spec: Any, **more: Any) -> set[str]:
        config = make_config("alltoall", **changes, **more)
        config.moe_token_dispatcher_type = dispatcher  # checked when the layer is built
        mtp_spec = get_gpt_mtp_block_spec(config, spec, False) if mtp else None
        model = GPTModel(config, spec, 64, 16, mtp_block_spec=mtp_spec)
        layers = [m for m in model.modules() if isinstance(m, MoELayer)]
        assert len(layers) == 1 + mtp
        return {type(layer).__name__ for layer in layers}

    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    hook = MoELayer.__new__
    MoELayer.__new__ = staticmethod(lambda cls, *args, **kwargs: object.__new__(cls))
    try:
        return {
            "hooks": kinds("alltoall", spec),
            "layers": kinds("mok", with_mok(spec)),
            "given": kinds("alltoall", spec),
            "refused": message_of(kinds, "mok", with_mok(spec), **padded),
        }
    finally:
        MoELayer.__new__ = staticmethod(hook)


def from_yaml(path: str, top: dict[str, Any], model: dict[str, Any]) -> tuple[str, int | None]:
    """What Megatron's own way from a --yaml-cfg file to a TransformerConfig for mok says, and the
    tokens per rank that the options then have.

    Args:
        path: where to write the file; each rank adds its number.
        top: keys of the file's top level.
        model: keys of its section language_model.
    """
    from megatron.training import global_vars, yaml_arguments

    set_up_parallel(2)
    parallel = {f.name for f in dataclasses.fields(ModelParallelConfig)}
    values = {
        name: value
        for name, value in vars(make_config("alltoall")).items()
        if value is None or isinstance(value, (bool, int, float, str, list))
    }
    fields = {f.name: values.get(f.name) for f in dataclasses.fields(TransformerConfig)}
    sections = {
        "language_model": {n: v for n, v in fields.items() if n not in parallel},
        "model_parallel": {n: v for n, v in fields.items() if n in parallel},
    }
    sections["language_model"] |= {
        "moe_token_dispatcher_type": "mok",
        "activation_func": "swiglu",
        "bias_swiglu_fusion": False,
        "init_method": None,
        "embedding_init_method": None,
        **model,
    }
    path = f"{path}.{torch.distributed.get_rank()}"
    Path(path).write_text(yaml.safe_dump({**top, **sections}))
    args = yaml_arguments.load_yaml(path)
    args.model_parallel.params_dtype = torch.float32  # Megatron's validation sets it
    global_vars._GLOBAL_ARGS = args
    set_options(None)
    try:
        said = message_of(yaml_arguments.core_transformer_config_from_yaml, args)
        return said, get_options().max_tokens_per_rank if not said else None
    finally:
        global_vars._GLOBAL_ARGS = None


class GroupedLinear(torch.nn.Module):
    """Stands for Transformer Engine's grouped linear: its parameters, multiplied one by one."""

    def __init__(
        self,
        num_gemms: int,
        in_size: int,
        out_size: int,
        *_: Any,
        bias: bool,
        skip_bias_add: bool,
        **__: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.bias, self.skip_bias_add = bias, skip_bias_add
        for index in range(num_gemms):
            for name, shape in (("weight", (out_size, in_size)), ("bias", (out_size,))):
                if name == "weight" or bias:
                    parameter = torch.nn.Parameter(torch.empty(shape))
                    parameter.allreduce = False
                    self.register_parameter(f"{name}{index}", parameter)

    def _all(self, name: str) -> list[torch.Tensor]:
        return [self._parameters[f"{name}{i}"] for i in range(self.num_gemms)]

    def forward(self, x: torch.Tensor, splits: Any) -> tuple[torch.Tensor, list | None]:
        parts = x.split([int(n) for n in splits])
        parts = [part @ w.t() for part, w in zip(parts, self._all("weight"), strict=True)]
        if self.bias and not self.skip_bias_add:
            parts = [part + bias for part, bias in zip(parts, self._all("bias"), strict=True)]
        return torch.cat(parts), self._all("bias") if self.bias and self.skip_bias_add else None


def grouped_experts(ep: int, mode: str = "fused", **changes: Any) -> dict[str, float]:
    """Relative differences of a layer of TEGroupedMLP experts under mok to that under alltoall."""
    set_up_parallel(ep, mode=mode)
    linears = [
        type(name, (GroupedLinear,), {"__module__": "megatron.core.extensions.transformer_engine"})
        for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
    ]
    experts = partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(*linears))
    layers = []
    for kind in ("alltoall", "mok"):
        layer = MoELayer(
            make_config(kind, moe_grouped_gemm=True, **changes),
            MoESubmodules(experts=experts),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        layer.set_layer_number(1)
        torch.manual_seed(7 + torch.distributed.get_rank())
        for parameter in layer.experts.parameters():
            torch.nn.init.normal_(parameter.data, std=0.1)
        layers.append(layer)
    native, fused = layers
    fused.load_state_dict(native.state_dict(), strict=True)
    expected, found = run_layer(native, 48), run_layer(fused, 48)
    assert list(expected) == list(found)
    return {n: relative_difference(found[n], expected[n]) for n in expected}
