"""`megatron-mok doctor`."""

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass

_DESCRIPTION = """\
Show what is installed, which engines and arms of `compare` work on this machine, and why each other
one does not.

An engine works when a small layer, computed here and now on one rank, agrees with PyTorch: forward
and backward. Arms are listed per device of a comparison (device: cpu or cuda).
"""

_EPILOG = """\
exit status: 0 --moe-token-dispatcher-type mok works on some device of this machine; 1 on none;
2 wrong arguments
"""

_DISTRIBUTIONS = ("torch", "triton", "transformer_engine", "deep_ep")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        problem: why it does not work, or None when it does.
        detail: what is worth knowing about it when it works.
    """

    name: str
    problem: str | None
    detail: str = ""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="show what works on this machine, and why the rest does not",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it; returns the exit status."""
    report = {
        "installed": installed(),
        "engines": engines(),
        "arms, device: cpu": arms("cpu"),
        "arms, device: cuda": arms("cuda"),
    }
    if args.json:
        tree = {title: [asdict(f) for f in findings] for title, findings in report.items()}
        print(json.dumps(tree, indent=1))
    else:
        _print(report)
    works = [f for title in report for f in report[title] if title.startswith("arms")]
    return 0 if any(f.name == "mok" and f.problem is None for f in works) else 1


def installed() -> list[Finding]:
    """Versions of what counts, and the GPUs."""
    import torch

    from megatron_mok.compare import probe
    from megatron_mok.megatron.install import TESTED_VERSIONS, is_tested

    findings = [Finding("python", None, platform.python_version())]
    for name in _DISTRIBUTIONS:
        try:
            findings.append(Finding(name, None, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "not installed"))
    version = probe.megatron_version()
    detail = f"{version}"
    if version is not None and not is_tested(version):
        detail += f" (megatron_mok is tested with {', '.join(TESTED_VERSIONS)})"
    findings.append(Finding("megatron-core", probe.no_megatron(), detail))
    if reason := probe.no_gpu():
        return [*findings, Finding("GPU", reason)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        findings.append(Finding(f"GPU {index}", None, detail))
    return findings


def engines() -> list[Finding]:
    """Whether each engine computes a small layer right."""
    from megatron_mok.compare import probe

    findings = []
    for name, device in (("host (CPU)", "cpu"), ("Hopper GPU", "cuda")):
        reason = probe.no_engine(device)
        findings.append(Finding(name, reason) if reason else _try_engine(name, device))
    return findings


def arms(device: str) -> list[Finding]:
    """What this machine lacks for each arm of `compare` on `device`."""
    from megatron_mok.compare import probe
    from megatron_mok.compare.arms import ARMS

    return [
        Finding(arm.name, probe.no_megatron() or arm.missing(device), " ".join(arm.flags))
        for arm in ARMS.values()
    ]


def _try_engine(name: str, device: str) -> Finding:
    from megatron_mok.runtime import MoKError

    try:
        forward, backward = _layer_differences(device)
    except (MoKError, ValueError, RuntimeError) as error:
        return Finding(name, f"{type(error).__name__}: {error}")
    text = f"forward within {forward:.0e} of PyTorch, gradients within {backward:.0e}"
    # BF16 has 8 bits: 2^-8 is 4e-3, and rounding twice more may add up to this.
    return Finding(name, None if max(forward, backward) < 2e-2 else f"wrong: {text}", text)


def _layer_differences(device: str) -> tuple[float, float]:
    """Relative differences of a BF16 layer of 100 tokens to the FP32 reference: output, and the
    worst of the gradients."""
    import torch

    from megatron_mok.ops import fused_moe
    from megatron_mok.reference import moe_layer
    from megatron_mok.runtime import LayerShape, Workspace

    tokens, hidden, ffn, experts, topk = 100, 128, 64, 4, 2
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

    inputs = [normal(tokens, hidden) * hidden**0.5]
    inputs += [normal(2 * ffn, hidden) for _ in range(experts)]
    inputs += [normal(hidden, ffn) for _ in range(experts)]
    ids_TK = torch.rand(tokens, experts, generator=generator).topk(topk).indices.int()
    probs_TK = torch.rand(tokens, topk, generator=generator)
    grad_TH = normal(tokens, hidden)

    def results(target: str, dtype: torch.dtype, layer) -> list[torch.Tensor]:
        x, *weights = (t.to(target, dtype).detach().requires_grad_() for t in inputs)
        routes = ids_TK.to(target), probs_TK.to(target)
        output = layer(x, *routes, weights[:experts], weights[experts:])
        output.backward(grad_TH.to(target, dtype))
        return [t.detach().float().cpu() for t in (output, x.grad, *(w.grad for w in weights))]

    shape = LayerShape(hidden, ffn, experts, topk, tokens, torch.bfloat16)
    (workspace,) = Workspace.in_process(shape, 1, device=device)
    found = results(device, torch.bfloat16, lambda *args: fused_moe(*args, workspace))
    expected = results("cpu", torch.float32, moe_layer)
    workspace.close()
    differences = [float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]
    return differences[0], max(differences[1:])


def _print(report: dict[str, list[Finding]]) -> None:
    width = max(len(f.name) for findings in report.values() for f in findings)
    colour = sys.stdout.isatty()
    for title, findings in report.items():
        print(f"{title}")
        for finding in findings:
            mark, text = ("yes", finding.detail) if finding.problem is None else ("no", "")
            text = text if finding.problem is None else finding.problem
            if colour:
                mark = f"\033[3{2 if mark == 'yes' else 1}m{mark:<3}\033[0m"
            print(f"  {mark:<3}  {finding.name:<{width}}  {text}")
        print()
