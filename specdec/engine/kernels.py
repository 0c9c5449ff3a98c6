"""Linear layers for a handful of rows: weights packed once for oneDNN, so that a pass reads each of them once.

A decoding pass multiplies every weight matrix by one to gamma + 1 rows. The stock CPU kernels take several times longer
for a few rows than for one, though the weights they read are the same; with the weights in oneDNN's own layout a few
rows cost about what one costs. Where that does not win, or torch can't do it, a layer stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

MAX_ROWS = 9  # as many as are timed, one by one: gamma 8 and one more; above, a product runs as it comes
TYPICAL_ROWS = (1, 5)  # a plain step and one at gamma 4: what packing is judged by
TIMINGS = 5  # per kernel and row count, the fastest counts
SAMPLE_BYTES = 128_000_000  # of weights of one shape; copies of them are packed for the timing alone
WORTHWHILE = 0.95  # a packed layer must take at most this share of the stock one's time
CLEARLY_FASTER = 0.9  # more rows than given are computed only where that takes at most this share of the time
TOLERANCE = 1e-4  # largest difference to the stock product, relative to its largest entry (float32)
HALF_TOLERANCE = 3e-2  # the same for half precision

_OPS = torch.library.Library("specdec", "DEF")
_OPS.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor")


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


_OPS.impl("packed_linear", _product, "CompositeExplicitAutograd")


@torch.library.register_fake("specdec::packed_linear")
def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@dataclass
class Packing:
    """Whether a model is packed now, and per shape, "out x in", the rows to compute for 1 to MAX_ROWS; None: stock."""

    plans: dict[str, Sequence[int] | None] = field(default_factory=dict)
    active: bool = False


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's layout; x: (..., rows, in) to (..., rows, out).

    ``rows``: how many rows to compute for 1, 2, ... given ones. oneDNN is slower for one or two rows than for a few
    more on some processors, so a block may be filled up.
    """

    def __init__(self, linear: nn.Linear, rows: Sequence[int], keep_weight: bool) -> None:
        super().__init__()
        self.rows = rows
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._linear = (linear,)  # in a tuple, so that its parameters are not this module's
        if not keep_weight:
            linear.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.shape[-2]
        wanted = self.rows[given - 1] if given <= len(self.rows) and x.dim() <= 3 and x.shape[:-2].numel() == 1 else 0
        if wanted > given:
            return self._multiply(nn.functional.pad(x, (0, 0, 0, wanted - given)))[..., :given, :]
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.specdec.packed_linear(x, self.packed, self.bias, self.out_features)
        return _product(x, self.packed, self.bias, self.out_features)

    def unpack(self) -> nn.Linear:
        """Return the layer as it was, bit for bit."""
        (linear,) = self._linear
        if linear.weight is None:
            linear.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        return linear


def use_packed_linears(model: nn.Module, packed: bool) -> None:
    """Convert ``model`` in place, layer by layer, so that at no time two copies of its weights are held.

    Packing times each shape once per model. A weight that another module uses too (a tied embedding) is kept beside
    its packed copy.
    """
    if not hasattr(model, "packing"):
        model.packing = Packing()
    if packed == model.packing.active or model.device.type != "cpu":
        return
    if packed:
        _pack(model)
    else:
        for parent, name, layer in _layers(model, PackedLinear):
            setattr(parent, name, layer.unpack())
    model.packing.active = packed


def plan_packing(model: nn.Module, plans: dict[str, Sequence[int] | None]) -> None:
    """Have ``model``, not packed yet, packed by an earlier run's plans (``Packing``), in place of timing its shapes."""
    model.packing = Packing(dict(plans))


def describe_kernels(model: nn.Module) -> str:
    """Return which share of a model's linear layers is packed, for people and the manifest."""
    packed, stock = (len(_layers(model, kind)) for kind in (PackedLinear, nn.Linear))
    return f"{packed} of {packed + stock} linear layers packed"


def _pack(model: nn.Module) -> None:
    plans = model.packing.plans
    shared = {id(weight) for module in model.modules() if type(module) is not nn.Linear for weight in _own(module)}
    by_shape: dict[str, list[tuple[nn.Module, str, nn.Linear]]] = {}
    for place in _layers(model, nn.Linear):
        by_shape.setdefault(" x ".join(map(str, place[2].weight.shape)), []).append(place)
    for shape, places in by_shape.items():
        if shape not in plans:
            plans[shape] = _plan([linear for _, _, linear in places])
        if plans[shape] is not None:
            for parent, name, linear in places:
                setattr(parent, name, PackedLinear(linear, plans[shape], id(linear.weight) in shared))


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _layers(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, attribute, layer) of every layer of exactly this class."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]


@torch.inference_mode()
def _plan(layers: list[nn.Linear]) -> tuple[int, ...] | None:
    """Return how many rows to compute for 1 to MAX_ROWS given ones, or None where the stock layers are as good.

    ``layers`` have one shape; up to SAMPLE_BYTES of them are timed in turn, since decoding finds no weight cached.
    """
    weight = layers[0].weight
    layers = layers[: max(1, SAMPLE_BYTES // weight.nbytes)]
    inputs = torch.randn(1, MAX_ROWS, weight.shape[1]).to(weight.dtype)
    try:
        packed = [PackedLinear(layer, (), keep_weight=True) for layer in layers]
        expected = layers[0](inputs)
        tolerance = TOLERANCE if inputs.dtype == torch.float32 else HALF_TOLERANCE
        if (packed[0](inputs) - expected).abs().max() > tolerance * expected.abs().max():
            return None
    except (RuntimeError, AttributeError):  # this torch or this processor has no such kernel for the dtype
        return None
    plan = _rows_to_compute([_fastest(packed, inputs[:, :rows]) for rows in range(1, MAX_ROWS + 1)])
    for layer in packed:
        layer.rows = plan
    ours, stock = (sum(_fastest(kind, inputs[:, :rows]) for rows in TYPICAL_ROWS) for kind in (packed, layers))
    return plan if ours <= WORTHWHILE * stock else None


def _rows_to_compute(seconds: list[float]) -> tuple[int, ...]:
    """Return for each row count the one, at least as large, that is fastest; itself unless another is so clearly."""
    plan = []
    for given, own in enumerate(seconds, start=1):
        best = min(range(given, len(seconds) + 1), key=lambda rows: seconds[rows - 1])
        plan.append(best if seconds[best - 1] <= CLEARLY_FASTER * own else given)
    return tuple(plan)


def _fastest(layers: list[nn.Module], x: torch.Tensor) -> float:
    """Return the seconds that multiplying ``x`` by each of ``layers`` in turn takes."""
    times = []
    for _ in range(1 + TIMINGS):
        started = time.perf_counter()
        for layer in layers:
            layer(x)
        times.append(time.perf_counter() - started)
    return min(times[1:])
