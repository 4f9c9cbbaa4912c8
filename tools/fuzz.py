"""Train random networks with and without compiled code, and compare all that comes of it, step by step.

One seed is one case: an architecture, settings of `crossbn.convert_`, and a training of a few steps. A twin of the
model takes each step from the same state with torch's operators alone (`library.switched_off`). Outputs, gradients,
buffers and histories have to agree. Where they do not to the last digits, the step in float64 says what is right, and
the same from slightly disturbed numbers how much of a difference rounding may make: clipping at a variance of 0, a
ReLU at its kink and a mean far from 0 make much of it.

    python tools/fuzz.py --seed 0 --cases 200                 # seeds 0 to 199
    python tools/fuzz.py --seed 17 --cases 1                  # one of them again
    python tools/fuzz.py --seed 0 --cases 9999 --seconds 60   # as many as a minute allows
    python tools/fuzz.py --seed 0 --cases 200 --sanitize      # with AddressSanitizer and UBSan in the compiled code

It exits with 1 at the first disagreement, which is printed with its seed.
"""

import argparse
import copy
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import crossbn
from crossbn.ops import library

CONVOLUTIONS: list[type[Any]] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED: list[type[Any]] = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
NORMS: list[type[Any]] = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
WIRINGS = ["plain", "plain", "plain", "activated", "normed first", "shared", "sum", "residual", "concatenation"]
WIRINGS += ["dense", "growing", "skipping"]
SIZES = [(1, 1), (3, 30), (3, 9), (2, 5)]  # smallest and largest, by number of dimensions
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
WIDE = [(185, 220), (105, 140), (60, 80), (35, 45)]  # channels of large weights
LARGEST_MAP = 50_000  # numbers in a batch of two
LONE_POSITION = "more than 1 value per channel"  # torch refuses such a batch, and so does a norm that burns in
VARIANTS = 6
NONE = torch.zeros(0)
Results = dict[str, Tensor]


class Precision(NamedTuple):
    """What is asked of results; both are relative to the largest number of a tensor."""

    close: float
    """Smaller differences are not looked into."""
    disturbance: float
    """How much the numbers that a step begins with are disturbed, to see what rounding does."""


PRECISIONS = {
    "float64": Precision(1e-10, 2**-48),
    "float32": Precision(2e-5, 2**-20),
    "autocast": Precision(2e-2, 2**-8),
}


def draw_operator(draw: random.Random, dims: int, inputs: int, outputs: int, keeps: bool = False) -> nn.Module:
    """Return a linear operator; one that `keeps` has an output of its input's size."""
    bias = draw.random() < 0.2
    if dims == 0:
        return nn.Linear(inputs, outputs, bias)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randint(low, high) for _ in range(dims))

    wide = min(inputs, outputs) > 30 and draw.random() < 0.6  # a large weight, of which samples are kept
    common = 1 if wide else math.gcd(inputs, outputs)
    groups = draw.choice([1, 1, common, draw.choice([d for d in range(1, common + 1) if common % d == 0])])
    options: dict[str, Any] = {"groups": groups, "bias": bias, "dilation": 1 if draw.random() < 0.7 else each(1, 2)}
    mode = draw.choice(["zeros", "zeros", "zeros", "circular", "replicate", "zeros" if keeps else "reflect"])
    if keeps:
        kernel = tuple(2 * size - 1 for size in each(1 + wide, 2))
        return CONVOLUTIONS[dims - 1](inputs, outputs, kernel, padding="same", padding_mode=mode, **options)
    kernel = each(3, 3) if wide else draw.choice([(1,) * dims, each(1, 3), each(3, 3)])
    options["stride"] = stride = draw.choice([(1,) * dims, (2,) * dims, each(1, 3)])
    if draw.random() < 0.2:
        extra = tuple(draw.randint(0, step - 1) for step in stride)
        return TRANSPOSED[dims - 1](inputs, outputs, kernel, padding=each(0, 1), output_padding=extra, **options)
    padding = draw.choice([(0,) * dims, (1,) * dims, each(0, 2)])
    return CONVOLUTIONS[dims - 1](inputs, outputs, kernel, padding=padding, padding_mode=mode, **options)


def draw_norm(draw: random.Random, dims: int, channels: int) -> nn.Module:
    """Return a batch norm whose parameters are not 1 and 0."""
    settings = {"affine": draw.random() < 0.85, "track_running_stats": draw.random() < 0.9}
    norm = NORMS[dims](
        channels, draw.choice([1e-5, 1e-5, 1e-3]), draw.choice([0.1, 0.1, 0.1, 0.5, 0.5, None]), **settings
    )
    for parameter, centre in zip(norm.parameters(), (1, 0), strict=False):
        nn.init.normal_(parameter, centre, 0.5)
    return norm


class Block(nn.Module):
    """One or two operators and norms, wired in one of several ways."""

    def __init__(self, draw: random.Random, dims: int, inputs: int, width: int) -> None:
        super().__init__()
        self.wiring = wiring = draw.choice(WIRINGS)
        keeps = wiring in ("residual", "dense")
        middle = inputs if wiring == "residual" else draw.choice([width, width, inputs, draw.randint(1, width)])
        self.first = draw_operator(draw, dims, inputs, middle, keeps)
        more = {"concatenation": middle, "dense": inputs, "growing": draw.randint(1, width)}.get(wiring, 0)
        self.outputs = middle + more
        if wiring in ("sum", "concatenation"):
            self.second = copy.deepcopy(self.first)
            nn.init.normal_(self.second.get_parameter("weight"), 0, 0.3)
        elif wiring in ("growing", "skipping"):
            self.second = draw_operator(draw, dims, middle, more or middle, keeps=True)
        normed = {"normed first": inputs, "growing": middle}.get(wiring, self.outputs)
        self.norm = draw_norm(draw, dims, normed)
        if wiring in ("shared", "growing"):
            self.other = draw_norm(draw, dims, self.outputs)
        self.activation = draw.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.GELU(), nn.Identity()])

    def extra_repr(self) -> str:
        """Return the wiring."""
        return self.wiring

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        wiring, act = self.wiring, self.activation
        if wiring == "normed first":
            return self.first(act(self.norm(x)))
        u = self.first(x)
        if wiring == "activated":
            return self.norm(act(u))
        if wiring == "shared":
            return self.norm(u) + act(self.other(u))
        if wiring == "skipping":
            return u + self.second(act(self.norm(u)))
        if wiring == "growing":
            return act(self.other(torch.cat([u, self.second(act(self.norm(u)))], 1)))
        if wiring in ("concatenation", "dense"):
            u = torch.cat([u, self.second(x)] if wiring == "concatenation" else [x, u], 1)
        elif wiring in ("sum", "residual"):
            u = u + (self.second(x) if wiring == "sum" else x)
        return act(self.norm(u))


def draw_network(draw: random.Random, dims: int) -> tuple[nn.Sequential, int]:
    """Return a network that can take the smallest map, and its number of input channels."""
    wide = draw.random() < 0.25
    while True:
        width = draw.randint(*WIDE[dims]) if wide else draw.randint(1, 9)
        inputs = channels = width if wide else draw.randint(1, 6)
        network = nn.Sequential()
        for _ in range(draw.randint(1, 4)):
            network.append(Block(draw, dims, channels, width))
            channels = network[-1].outputs  # type: ignore[assignment]  # of a Block
        if all(_fits(network, torch.zeros(2, inputs, *[size] * dims)) for size in SIZES[dims]):
            return network, inputs


@torch.no_grad()
def _fits(network: nn.Sequential, x: Tensor) -> bool:
    """Tell whether all maps have a size, and none a large one."""
    try:
        for block in network.eval():
            x = block(x)
            if not 0 < x.numel() <= LARGEST_MAP:
                return False
    except RuntimeError:
        return False
    return True


def draw_settings(draw: random.Random) -> dict[str, Any]:
    """Return settings of `convert_`, most of them the usual ones."""
    settings: dict[str, Any] = {"window": draw.randint(2, 9), "unpaired": draw.choice(["pool", "bn"])}
    settings["positions"] = draw.choice([128, 128, 16, 1, draw.randint(2, 40), None])
    others: dict[str, list[Any]] = {
        "burn_in": [draw.randint(1, 4)],
        "order": [0, 2],
        "backward": ["detached"],
        "invalid": ["drop"],
        "decay": [0.7, 0.2],
        "history_dtype": [torch.bfloat16],
    }
    return settings | {name: draw.choice(choices) for name, choices in others.items() if draw.random() < 0.08}


class Step(NamedTuple):
    """A step of a training: one or more batches in float64, and what happens to them."""

    kind: str
    inputs: list[Tensor]
    layout: str = "dense"
    follows_inputs: bool = False
    autocast: bool = False


def arranged(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another place of memory."""
    if layout == "sliced":
        return torch.cat([x, x], 1)[:, : x.shape[1]]
    if layout == "every second":
        return torch.stack([x, x], -1)[..., 0]
    return x.to(memory_format=LAST[x.ndim]) if layout == "channels last" and x.ndim in LAST else x


def take_step(model: nn.Module, step: Step, dtype: torch.dtype) -> Results:
    """Run the batches forward and, in training, backward; return all that has come of it."""
    results: Results = {}
    model.train(step.kind != "evaluation").zero_grad()
    for i, given in enumerate(step.inputs):
        x = arranged(given.to(dtype), step.layout).detach().requires_grad_(step.follows_inputs)
        cast = torch.autocast("cpu", torch.bfloat16) if step.autocast and dtype is torch.float32 else nullcontext()
        try:
            with torch.set_grad_enabled(step.kind != "no_grad"), cast:
                y = model(x)
        except ValueError as error:
            if LONE_POSITION not in str(error):
                raise
            results[f"refusal {i}"] = torch.ones(())
            continue
        results[f"output {i}"], y = y.detach().clone(), y.to(dtype)
        if y.requires_grad and step.kind == "training":
            y.retain_grad()
            (y * (y + torch.arange(y.numel()).cos().view_as(y))).mean().backward()
            assert y.grad is not None
            results[f"gradient of output {i}"] = y.grad  # what others are small or large against
        if x.grad is not None:
            results[f"gradient of input {i}"] = x.grad
    results |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return results | {f"history {name}": value for name, value in _readable(crossbn.history_state(model)).items()}


def _readable(history: Results) -> Results:
    """Weigh samples by what they count: places that a small batch left empty may hold anything, nothing reads it."""
    result = dict(history)
    for name, value in history.items():
        centred = history.get(f"{name.rpartition('/')[0]}/centred")
        if centred is not None and name.endswith(("rows", "products")):
            counts = centred.abs().sum(2)
            counts[:, 0] = 1
            result[name] = value * counts.reshape(*counts.shape, *[1] * (value.ndim - 2))
    return result


def largest(x: Tensor) -> float:
    """Return the largest finite magnitude."""
    return float(x.double().abs().nan_to_num(0, 0).max()) if x.numel() else 0.0


def gap(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference; infinity if that cannot be told."""
    if one is None or other is None or one.shape != other.shape or not one.isfinite().equal(other.isfinite()):
        return math.inf
    return largest(one.double() - other.double())


def _allowed(results: Results, name: str, close: float, floor: float) -> float:
    """Return what a result may be off: a part of itself and, since some of them vanish, of the largest of its kind."""
    kind = name.split()[0]
    scale = max((largest(value) for other, value in results.items() if other.startswith(kind)), default=0)
    return close * max(largest(results.get(name, NONE)), floor * scale * (1 if kind == "gradient" else 0.01))


class Case:
    """What a seed says: a network, its twin, and their training."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.precision = draw.choices(list(PRECISIONS), (5, 5, 1))[0]
        self.dtype = torch.float64 if self.precision == "float64" else torch.float32
        self.dims, self.offset = draw.choice([0, 1, 2, 2, 3]), draw.choice([0, 0, 0, 1, 30, 1000])
        self.sizes = [SIZES[self.dims][1]] * self.dims
        self.layout = draw.choice(["dense"] * 5 + ["channels last", "sliced", "every second"])
        self.model, self.channels = draw_network(draw, self.dims)
        self.model.to(self.dtype)
        if any(getattr(module, "padding_mode", "") == "reflect" for module in self.model.modules()):
            self.layout = "dense"  # torch 2.13 writes beyond its memory: backward of reflect, channels last
        if self.layout == "channels last" and self.dims > 1:
            self.model.to(memory_format=LAST[self.dims + 2])  # type: ignore[call-overload]  # torch's types lack it
        self.settings = draw_settings(draw)
        self.description = f"{self.model}\n{self.settings}, {self.precision}, {self.layout}, offset {self.offset}"
        if draw.random() < 0.1:
            draw.choice(list(self.model.parameters())).requires_grad_(False)
        rate = draw.choice([0.01, 0.1, 0.5])
        self.optimizer = torch.optim.SGD(self.model.parameters(), rate, momentum=0.9)
        report = crossbn.convert_(self.model, **self.settings)
        self.converted = bool(report.compensated or report.pooled)
        self.twin = copy.deepcopy(self.model)
        self.settled = 0

    def draw_step(self) -> Step:
        """Return the next step, after what may come between steps."""
        draw, low, high = self.draw, *SIZES[self.dims]
        if draw.random() < 0.05:
            self.model.load_state_dict({n: 0.9 * v if "weight" in n else v for n, v in self.model.state_dict().items()})
        if draw.random() < 0.03 and self.converted:
            window = draw.randint(1, 9)
            crossbn.set_window_(self.model, window)
            crossbn.set_window_(self.twin, window)
        if draw.random() < 0.02:
            crossbn.reset_history_(self.model)
        kind = draw.choices(["training", "evaluation", "no_grad", "forward only"], (17, 1, 1, 1))[0]
        inputs = []
        for _ in range(draw.choice([1, 1, 1, 1, 1, 2, 3])):
            if draw.random() < 0.3:
                self.sizes = [draw.randint(low, high) for _ in range(self.dims)]
            shape = draw.choice([1, 2, 3, draw.randint(1, 8)]), self.channels, *self.sizes
            inputs.append(torch.randn(shape, dtype=torch.float64) + self.offset * draw.random())
        if draw.random() < 0.04:
            inputs[-1].view(-1)[draw.randrange(inputs[-1].numel())] = draw.choice([math.nan, math.inf])
        return Step(kind, inputs, self.layout, draw.random() < 0.5, self.precision == "autocast")

    def compare(self, step: Step) -> str:
        """Take the step with compiled code and without; return what disagrees, nothing if all is well."""
        before = {n: v.clone() for n, v in self.model.state_dict().items()}, crossbn.history_state(self.model)
        _restore(self.twin, *before)
        got = take_step(self.model, step, self.dtype)
        with library.switched_off():
            want = take_step(self.twin, step, self.dtype)
        close, _ = PRECISIONS[self.precision]
        doubtful = [n for n in want | got if gap(got.get(n), want.get(n)) > _allowed(want, n, close, 0.01)]
        return self.settle(step, before, got, want, doubtful) if doubtful else ""

    def settle(self, step: Step, before: tuple[Results, Results], got: Results, want: Results, names: list[str]) -> str:
        """Let float64 say whether results that differ are both as right as rounding allows."""
        close, disturbance = PRECISIONS[self.precision]
        self.settled += 1
        exact = self.disturbed(step, *before, 0)
        variants: list[Results] = []
        for name in names:
            coarse = 2**-7 if name.startswith("history") and "history_dtype" in self.settings else close
            error, twin = gap(got.get(name), exact.get(name)), gap(want.get(name), exact.get(name))
            allowed = _allowed(exact, name, coarse, 1) + 3 * twin
            if name.startswith("history"):  # the mean's rounding, times inputs as far from 0
                allowed += 0.1 * disturbance * self.offset**2
            if error > allowed:
                variants = variants or [self.disturbed(step, *before, disturbance) for _ in range(VARIANTS)]
                allowed += 10 * max(gap(exact.get(name), variant.get(name)) for variant in variants)
            if error > allowed:
                return f"{name}: off by {error:.3g}, without compiled code by {twin:.3g}; {allowed:.3g} is allowed"
        return ""

    def disturbed(self, step: Step, state: Results, history: Results, disturbance: float) -> Results:
        """Take the step in float64 without compiled code, from slightly disturbed numbers and disturbed on the way."""

        def disturb(x: Tensor) -> Tensor:
            noise = torch.randn(x.shape, dtype=torch.float64)
            return x.double() * (1 + disturbance * noise) if x.is_floating_point() else x

        def waver(x: Tensor) -> Tensor:  # a channel's numbers share the rounding of its statistics
            shift = disturbance * x.double().abs().nan_to_num(0, 0).mean()
            return disturb(x) + shift * torch.randn(x.shape[1], *[1] * (x.ndim - 2), dtype=torch.float64)

        def disturb_output(module: nn.Module, _: Any, y: Tensor) -> Tensor:
            if y.requires_grad:
                y.register_hook(waver)
            # What an operator returns stays what its norm gets.
            return y if hasattr(module, "weight") and not isinstance(module, _NormBase) else waver(y)

        model = copy.deepcopy(self.twin).double()
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(disturb_output)
        _restore(model, {name: disturb(value) for name, value in state.items()}, history)

        def disturb_history(*_: Any) -> None:  # that of the batches before in this step as well
            crossbn.load_history_state(model, {n: disturb(v) for n, v in crossbn.history_state(model).items()})

        model.register_forward_pre_hook(disturb_history)
        with library.switched_off():
            return take_step(model, step._replace(inputs=list(map(disturb, step.inputs))), torch.float64)

    def advance(self) -> None:
        """Let the optimizer step, unless gradients are not finite."""
        if all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters()):
            self.optimizer.step()


def _restore(model: nn.Module, state: Results, history: Results) -> None:
    model.load_state_dict(state)
    crossbn.load_history_state(model, history)


def examine(seed: int) -> tuple[int, int, str]:
    """Run a case; return steps taken, how many of them float64 had to settle, and what disagrees, if anything."""
    threads, number = torch.get_num_threads(), 0
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(seed)
        torch.set_num_threads(case.draw.choice([1, 1, 1, 1, 1, 3]))
        try:
            for number in range(1, case.draw.randint(4, 14)):
                step = case.draw_step()
                if problem := case.compare(step):
                    shapes = [tuple(x.shape) for x in step.inputs]
                    return number, case.settled, f"{case.description}\nstep {number}, {step.kind} {shapes}: {problem}"
                case.advance()
        except Exception:  # Whatever is raised is a finding.
            return number, case.settled, f"{case.description}\nstep {number}: {traceback.format_exc()}"
        finally:
            torch.set_num_threads(threads)
    return number, case.settled, ""


def run_sanitized(arguments: list[str]) -> int:
    """Run this file with a library that watches its own memory."""
    sources = map(str, Path(crossbn.__file__).parent.rglob("*.c"))
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1 -fopenmp -fPIC -shared"
    # torch throws exceptions, which AddressSanitizer has to find where it is loaded itself.
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libstdc++.so.6")]
    first = [subprocess.run(["gcc", name], capture_output=True, text=True, check=True).stdout.strip() for name in names]
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/sanitized.so"
        subprocess.run(["gcc", *flags.split(), *sources, "-o", built, "-lm"], check=True)
        environment = {"CROSSBN_LIBRARY": built, "LD_PRELOAD": " ".join(first), "PYTHONMALLOC": "malloc"}
        environment |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        command = [sys.executable, __file__, *arguments, "--verbose"]
        return subprocess.run(command, env=os.environ | environment, check=False).returncode


def main() -> int:
    """Run the cases that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after that time")
    parser.add_argument("--sanitize", action="store_true", help="watch the compiled code's memory and arithmetic")
    parser.add_argument("--verbose", action="store_true", help="name each seed before its case begins")
    options = parser.parse_args()
    if options.sanitize:
        return int(run_sanitized([argument for argument in sys.argv[1:] if argument != "--sanitize"]) != 0)
    path = os.environ.get("CROSSBN_LIBRARY", "")
    if not library.is_available() or path not in Path("/proc/self/maps").read_text():
        print(f"The compiled library is not in use: {path or 'it was not built'}", file=sys.stderr)
        return 1
    started, done, steps, settled = time.perf_counter(), 0, 0, 0
    for seed in range(options.seed, options.seed + options.cases):
        if time.perf_counter() - started > options.seconds:
            break
        if options.verbose:
            print(f"--seed {seed} --cases 1", file=sys.stderr, flush=True)
        taken, doubtful, problem = examine(seed)
        done, steps, settled = done + 1, steps + taken, settled + doubtful
        if problem:
            print(f"--seed {seed} --cases 1 disagrees:\n{problem}")
            return 1
    seconds = time.perf_counter() - started
    print(f"{done} cases, {steps} steps ({settled} settled in float64) agree; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
