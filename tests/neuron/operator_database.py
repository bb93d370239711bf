"""torch's own operator database, run on `neuron` and on the CPU and compared.

`op_db` lists about 700 entries: an operator or a variant of one, with a function that makes sample inputs. Of each entry the first samples are run
forward and, where they exist, backward, in place and with `out=`, once on the CPU and once on `neuron`, from the same bytes and with the same seed. The entry is

- `equal`: every result, gradient and changed input has the CPU's device-independent facts (shape, strides, dtype) and its bits;
- `close`: the facts are equal, and the values within 1e-5, relative or absolute;
- `differs`, `fails` or `crashes`: neither; with what was seen;
- `excluded`: the CPU itself cannot run the samples, so there is nothing to compare with.

To be fair to both sides: inputs are copied with their whole storage, so that views, overlaps and offsets are the same; a `device` among the arguments
becomes the device under test; arguments which torch demands on the CPU stay there; of results that are never written (`empty`) only the facts are
compared; random operators start from the same seed.

It runs as a module, in a process of its own, because importing torch's test utilities changes torch for the whole process (flags of its backends can no
longer be set): `python -m tests.neuron.operator_database --out FILE` appends one JSON line an entry and, if the file exists, goes on behind its last line,
so that after a crash the rest can still be run. All entries with all their samples, 19 thousand, take about a minute and a half on one core.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

SAMPLES = 2
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float8_e4m3fn)

# Results whose values nobody wrote: shape, strides and dtype are compared, values are not.
UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}
# Arguments that have to be on the CPU on every device: position among the arguments after the first.
ON_THE_CPU = {"tensor_split": {0}}


@dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    Attributes:
        name: the entry, `name.variant`.
        verdict: `equal`, `close`, `differs`, `fails`, `crashes` or `excluded`.
        detail: what was seen, for all but `equal`.
        difference: largest absolute difference from the CPU, over results, gradients and inputs.
        samples: how many sample inputs were compared.
        backward: how many of them were compared backward too.
        variants: how many more calls were compared, in place or with `out=`.
    """

    name: str
    verdict: str
    detail: str = ""
    difference: float = 0.0
    samples: int = 0
    backward: int = 0
    variants: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Found:
    """What a comparison saw; the worst of many is the one of the highest rank."""

    verdict: str
    detail: str = ""
    difference: float = 0.0

    @property
    def rank(self) -> int:
        return ("equal", "close", "differs", "fails").index(self.verdict)


def entries() -> list[Any]:
    """All entries of `op_db`, in its order. The import takes some seconds, so it waits until it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def name_of(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


class _Placer:
    """Copies values to a device with their storage, so that what shared memory before shares memory after."""

    def __init__(self, device: str, *, with_grad: bool) -> None:
        self.device = device
        self.with_grad = with_grad
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return self.device
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_conj() or source.is_neg():
            copy = source.to(self.device) if self.device != "cpu" else source.clone()
        else:
            key = (source.untyped_storage()._cdata, source.dtype)
            if key not in self._storages:
                count = source.untyped_storage().nbytes() // source.element_size()
                flat = torch.empty(0, dtype=source.dtype).set_(source.untyped_storage(), 0, (count,), (1,))
                self._storages[key] = flat.to(self.device) if self.device != "cpu" else flat.clone()
            copy = self._storages[key].as_strided(source.size(), source.stride(), source.storage_offset())
            copy = copy.detach()
        return copy.requires_grad_(tensor.requires_grad and self.with_grad)


FORMS = ("function", "in place", "out")


@dataclass
class _Run:
    """One sample on one device in one form."""

    results: list[Any]
    inputs: list[Any]
    gradients: list[Any] | None = None
    backward_error: str = ""


def _leaves(value: Any) -> list[Any]:
    return tree_flatten(value)[0]


def _run(entry: Any, sample: Any, device: str, seed: int, form: str) -> _Run:
    """Call the entry on copies of the sample's inputs. As a function also backward; in place and with `out=` without derivatives.

    `out=` gets tensors of the right shape for even seeds, and empty ones that have to grow for odd ones.
    """
    place = _Placer(device, with_grad=form == "function")
    stays = ON_THE_CPU.get(entry.name, set())
    first = tree_map(place, sample.input)
    rest = tuple(
        argument if position in stays and isinstance(argument, Tensor) else tree_map(place, argument)
        for position, argument in enumerate(sample.args)
    )
    named = {name: tree_map(place, argument) for name, argument in sample.kwargs.items()}
    inputs = [leaf for leaf in _leaves((first, rest, named)) if isinstance(leaf, Tensor)]
    torch.manual_seed(seed)
    if not inputs and "device" not in named:  # a factory that takes the default device
        with torch.device(device):
            return _Run(_leaves(entry.op(first, *rest, **named)), inputs)
    if form == "in place":
        result = entry.inplace_variant(first, *rest, **named)
        return _Run([*_leaves(result), result is first], inputs)
    if form == "out":
        shapes = entry.op(first, *rest, **named)
        out = tree_map(lambda t: t.new_zeros(t.shape if seed % 2 == 0 else (0,)), shapes)
        torch.manual_seed(seed)
        result = entry.op(first, *rest, **named, out=out if isinstance(out, Tensor) else tuple(out))
        same = [one is other for one, other in zip(_leaves(result), _leaves(out), strict=True)]
        return _Run([*_leaves(out), *same], inputs)

    leaves = _leaves(sample.output_process_fn_grad(entry.op(first, *rest, **named)))
    run = _Run(leaves, inputs)
    wanted = [leaf for leaf in inputs if leaf.requires_grad and leaf.is_leaf]
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if wanted and outputs:
        generator = torch.Generator().manual_seed(seed)
        directions = [
            torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
            if output.layout is torch.strided
            else torch.ones_like(output)
            for output in outputs
        ]
        try:
            run.gradients = list(torch.autograd.grad(outputs, wanted, directions, allow_unused=True))
        except Exception as error:  # judged by the caller: an error on the CPU too is no difference
            run.backward_error = f"{type(error).__name__}: {error}"
    return run


def _facts(tensor: Tensor) -> str:
    strides = f", strides {tuple(tensor.stride())}" if tensor.layout is torch.strided and tensor.numel() else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}{strides}"


def compare_values(expected: Any, got: Any, *, values: bool) -> Found:
    """Compare one leaf of a result; without `values` only shape, strides and dtype of tensors."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        same = type(expected) is type(got) and (expected == got or (expected != expected and got != got))
        if isinstance(expected, torch.device):
            same = isinstance(got, torch.device)
        return Found("equal") if same else Found("differs", f"{got!r:.60} instead of {expected!r:.60}")
    if _facts(expected) != _facts(got):
        return Found("differs", f"{_facts(got)} instead of {_facts(expected)}")
    if not values:
        return Found("equal")
    expected, got = expected.detach(), got.detach().cpu()
    if expected.layout is not torch.strided:
        expected, got = expected.to_dense(), got.to_dense()
    expected, got = expected.resolve_conj().resolve_neg(), got.resolve_conj().resolve_neg()
    if expected.dtype.itemsize == 1 and expected.dtype.is_floating_point:
        expected, got = expected.float(), got.float()
    if expected.dtype.is_complex:
        expected, got = torch.view_as_real(expected), torch.view_as_real(got)
    unequal = (expected != got) & ~((expected != expected) & (got != got))
    if not unequal.any():
        return Found("equal")
    difference = (expected.double() - got.double()).abs().nan_to_num(float("inf")).max().item()
    close = torch.allclose(expected.double(), got.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
    detail = f"{int(unequal.sum())} of {unequal.numel()} values, largest difference {difference:.1e}"
    return Found("close" if close else "differs", detail, difference)


def compare(
    entry: Any, *, device: str = "neuron", samples: int = SAMPLES, dtypes: Sequence[torch.dtype] = DTYPES
) -> Outcome:
    """Run the first `samples` sample inputs of an entry on the CPU and on `device`: forward, backward, in place, with `out=`.

    Its dtype is the first of `dtypes` that the entry supports on the CPU.
    """
    name = name_of(entry)
    supported = entry.supported_dtypes("cpu")
    dtype = next((dtype for dtype in dtypes if dtype in supported), None)
    if dtype is None:
        return Outcome(name, "excluded", "no such dtype on the CPU")
    with_grad = bool(entry.supports_autograd) and dtype in entry.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    try:
        inputs = list(itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=with_grad), samples))
    except Exception as error:
        return Outcome(name, "excluded", f"samples on the CPU: {type(error).__name__}: {error!s:.150}")

    worst, compared, refused = Found("equal"), collections.Counter[str](), ""
    for (seed, sample), form in itertools.product(enumerate(inputs), _forms(entry)):
        try:
            here = _run(entry, sample, "cpu", seed, form)
        except Exception as error:
            refused = refused or f"{type(error).__name__}: {error!s:.150}"
            continue
        compared[form] += 1
        compared["backward"] += here.gradients is not None
        try:
            there = _run(entry, sample, device, seed, form)
        except Exception as error:
            found = Found("fails", f"{type(error).__name__}: {error!s:.300}")
        else:
            found = _compare_runs(here, there, device, values=entry.name not in UNWRITTEN)
        if found.rank > worst.rank:
            worst = Found(
                found.verdict, f"sample {seed} ({form}): {found.detail}", max(found.difference, worst.difference)
            )
    if not compared["function"]:
        return Outcome(name, "excluded", refused or "no sample inputs")
    variants = compared["in place"] + compared["out"]
    return Outcome(
        name, worst.verdict, worst.detail, worst.difference, compared["function"], compared["backward"], variants
    )


def _forms(entry: Any) -> list[str]:
    has = {
        "function": True,
        "in place": entry.inplace_variant is not None and entry.name not in UNWRITTEN,
        "out": entry.supports_out and entry.name not in UNWRITTEN,
    }
    return [form for form in FORMS if has[form]]


def _compare_runs(here: _Run, there: _Run, device: str, *, values: bool) -> Found:
    if there.backward_error and not here.backward_error:
        return Found("fails", f"backward: {there.backward_error:.300}")
    if (here.gradients is None) != (there.gradients is None):
        return Found("differs", "gradients on one device only")
    worst = Found("equal")
    for kind, expected, got in (
        ("results", here.results, there.results),
        ("inputs", here.inputs, there.inputs),
        ("gradients", here.gradients or [], there.gradients or []),
    ):
        if len(expected) != len(got):
            return Found("differs", f"{len(got)} {kind} instead of {len(expected)}")
        for position, (one, other) in enumerate(zip(expected, got, strict=True)):
            if isinstance(other, Tensor) and kind != "inputs" and other.device.type != torch.device(device).type:
                found = Found("differs", f"is on {other.device}")
            else:
                found = compare_values(one, other, values=values or kind == "gradients")
            if found.rank > worst.rank:
                worst = Found(found.verdict, f"{kind}[{position}]: {found.detail}", found.difference)
    return worst


def read(path: Path) -> Iterator[Outcome]:
    """The outcomes that a sweep has written so far."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield Outcome(**json.loads(line))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines; an existing one is continued")
    parser.add_argument("--device", default="neuron", help="the device that is compared with the CPU")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="sample inputs an entry, at most")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="these entries instead of all")
    parser.add_argument("--crashed", metavar="HOW", help="write the next entry down as a crash, instead of running it")
    parser.add_argument("--dtype", help="this dtype only; otherwise float32, or the first that an entry has")
    chosen = parser.parse_args(arguments)
    torch.empty(0, device=chosen.device)  # no such device: say so once, not in every entry
    dtypes = (getattr(torch, chosen.dtype),) if chosen.dtype else DTYPES
    known = entries()
    if chosen.only:
        by_name = {name_of(entry): entry for entry in known}
        known = [by_name[name] for name in chosen.only]
    done = len(list(read(chosen.out))) if chosen.out.exists() else 0
    with warnings.catch_warnings(), chosen.out.open("a", encoding="utf-8") as out:
        warnings.simplefilter("ignore")
        if chosen.crashed:
            out.write(Outcome(name_of(known[done]), "crashes", chosen.crashed).to_json() + "\n")
            done += 1
        for entry in known[done:]:
            out.write(compare(entry, device=chosen.device, samples=chosen.samples, dtypes=dtypes).to_json() + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
