r"""Convert every architecture of seven libraries and hold the report against what autograd says feeds each norm.

The truth and the checks are those of `tests/test_survey.py`; here are the architectures and the table. Libraries that
are not installed are left out, so it is best run in an environment of its own:

    python -m venv .venv-survey && .venv-survey/bin/pip install -c constraints.txt torch torchvision timm pytest \
        segmentation-models-pytorch monai einops ultralytics transformers efficientnet_lite_pytorch
    export PYTHONPATH=src:. OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
    .venv-survey/bin/python tools/survey.py --output survey.jsonl --workers 2               # goes on where it stopped
    .venv-survey/bin/python tools/survey.py --output survey.jsonl --library timm --match 'resnet*' --limit 10
    .venv-survey/bin/python tools/survey.py --output survey.jsonl --limit 0 --table docs/architectures.md
"""

import argparse
import contextlib
import copy
import fnmatch
import functools
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tests.test_survey import Call, examine, find_truth, norms_of
from torch import nn

from crossbn.compat import ensure_torchvision

LARGEST = 150_000_000  # parameters; what has more is listed and not run
SQUARES = [(3, size, size) for size in (64, 128, 224, 256)]
MARK = "<!-- What follows is written by tools/survey.py. -->"
Result = dict[str, Any]
Build = Callable[[], nn.Module]
Calls = Callable[[nn.Module], Iterable[Call]]
Cases = Iterator[tuple[str, Build, Calls]]


def _shapes(*shapes: tuple[int, ...]) -> Calls:
    return lambda _: [functools.partial(lambda shape, model: model(torch.randn(2, *shape)), shape) for shape in shapes]


def _timm(timm: Any) -> Cases:
    for name in timm.list_models():
        config = timm.get_pretrained_cfg(name, allow_unregistered=True)
        size = config.input_size if config else (3, 224, 224)
        yield name, functools.partial(timm.create_model, name), _shapes(*SQUARES[:2], size)


def _torchvision(torchvision: Any) -> Cases:
    target = {"boxes": torch.tensor([[8.0, 8.0, 60.0, 70.0]]), "labels": torch.tensor([1])}
    target |= {"masks": torch.ones(1, 96, 96, dtype=torch.uint8), "keypoints": torch.full((1, 17, 3), 20.0)}
    for name in torchvision.models.list_models():
        kind = torchvision.models.get_model_builder(name).__module__.split(".")[2]
        settings = {"weights_backbone": None} if kind in ("detection", "segmentation") else {}
        calls = _shapes((3, 16, 64, 64)) if kind == "video" else _shapes(*SQUARES[:3], (3, 299, 299))
        if kind == "detection":
            calls = lambda _: [lambda model: model([torch.rand(3, 96, 96)] * 2, [target] * 2)]  # noqa: E731
        elif kind == "optical_flow":
            calls = lambda _: [lambda model: model(*torch.rand(2, 2, 3, 128, 128))]  # noqa: E731
        yield name, functools.partial(torchvision.models.get_model, name, weights=None, **settings), calls


def _segmentation_models_pytorch(smp: Any) -> Cases:
    nets = {f"Unet {name}": functools.partial(smp.Unet, name) for name in smp.encoders.get_encoder_names()}
    for name, net in (nets | {net.__name__: net for net in smp.MODEL_ARCHITECTURES_MAPPING.values()}).items():
        yield name, functools.partial(net, encoder_weights=None), _shapes(*SQUARES)


def _monai(_: Any) -> Cases:
    given = {"spatial_dims": 2, "in_channels": 3, "n_input_channels": 3, "num_channels": 3, "in_shape": SQUARES[0]}
    given |= {"out_channels": 2, "num_classes": 2, "classes": 2, "out_shape": (2,), "latent_size": 4, "depth": 2}
    given |= {"norm": "batch", "norm_name": "batch", "channels": (8, 16, 32), "strides": (2, 2, 2), "block": "basic"}
    given |= {"layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 32, 64), "img_size": (64, 64), "pretrained": False}
    given |= {"image_size": (64, 64), "num_channel_initial": 4, "extract_levels": (0, 1, 2), "backbone": "resnet18"}
    given |= {"latent_shape": SQUARES[0], "start_shape": (8, 4, 4), "model_name": "efficientnet-b0", "patch_size": 16}
    own: dict[str, dict[str, Any]] = {name: {"strides": (2, 2)} for name in ("UNet", "AttentionUnet")}
    own |= {name: {"backbone": "efficientnet-b0"} for name in ("FlexibleUNet", "FlexUNet")}
    own |= {name: {"spatial_dims": 2, "in_channels": 3} for name in ("SENet154", "SEResNet50", "SEResNext50")}
    own |= {"DynUNet": {"kernel_size": (3, 3, 3), "upsample_kernel_size": (2, 2), "strides": (1, 2, 2)}}
    own |= {
        "ResNetFeatures": {"model_name": "resnet18"},
        "SegResNet": {"norm_name": ""},
        "MILModel": {"backbone": None},
    }
    for name, net in inspect.getmembers(importlib.import_module("monai.networks.nets"), inspect.isclass):
        if issubclass(net, nn.Module) and net.__name__ == name:
            known = {key: value for key, value in given.items() if key in inspect.signature(net).parameters}
            build = functools.partial(net, **known | own.get(name, {}))
            yield name, build, _shapes(*SQUARES, (4, *SQUARES[0]), (3, 64, 64, 64))


def _ultralytics(ultralytics: Any) -> Cases:
    for path in sorted(Path(ultralytics.__file__).parent.glob("cfg/models/*/*.yaml")):
        family = ultralytics.RTDETR if "rtdetr" in path.stem else ultralytics.YOLO
        for name in dict.fromkeys([path.stem, re.sub(r"^(yolo(e-)?v?\d+)(?!\d|[a-z]$)", r"\1m", path.stem)]):
            build = functools.partial(lambda family, name: family(f"{name}.yaml").model, family, name)
            yield name, build, _shapes(*SQUARES)


def _efficientnet_lite_pytorch(lite: Any) -> Cases:
    for name in (f"efficientnet-lite{size}" for size in range(5)):
        yield name, functools.partial(lite.EfficientNet.from_name, name), _shapes(*SQUARES)


def _transformers(transformers: Any) -> Cases:
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if re.search("BatchNorm|load_backbone", path.read_text()):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for name in (n for n in module.__all__ if re.search("Model$|Backbone$|For", n) and "PreTrained" not in n):
                yield name, functools.partial(lambda net: net(net.config_class()), getattr(module, name)), _inputs


def _inputs(model: Any) -> list[Call]:
    names, config = inspect.signature(model.forward).parameters, model.config
    tokens, size = torch.ones(2, 16, dtype=torch.long), getattr(config, "image_size", 256)
    given = {"input_ids": tokens, "attention_mask": tokens, "input_values": torch.randn(2, 16000)}
    given |= {"input_features": torch.randn(2, 128, getattr(config, "num_mel_bins", 80))}
    images = [torch.randn(2, *shape) for shape in [*SQUARES, (3, size, size)]]
    choices = [{key: x for key, x in (given | {"pixel_values": image}).items() if key in names} for image in images]
    return [functools.partial(lambda inputs, model: model(**inputs), inputs) for inputs in choices]


LIBRARIES: dict[str, Callable[[Any], Cases]] = {function.__name__[1:]: function for function in (
    _timm, _torchvision, _segmentation_models_pytorch, _monai, _ultralytics, _transformers, _efficientnet_lite_pytorch
)}  # fmt: skip


@functools.cache
def catalogue(library: str) -> dict[str, tuple[Build, Calls]]:
    """Return how to build each architecture of a library, and the calls to try on it, cheapest first."""
    return {name: (build, calls) for name, build, calls in LIBRARIES[library](importlib.import_module(library))}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].replace("|", "/")


def survey(library: str, name: str) -> Result:
    """Build, count, run and convert one architecture."""
    started = time.perf_counter()
    result: Result = {"library": library, "name": name, "outcome": "not built"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    build, calls = catalogue(library)[name]
    try:
        model = None
        with contextlib.suppress(Exception), torch.device("meta"):  # Not every constructor knows meta tensors.
            model = build()
        model = model or build()
        result |= {"family": type(model).__module__, "parameters": sum(p.numel() for p in model.parameters())}
        if not norms_of(model) or result["parameters"] > LARGEST:
            return result | {"outcome": "too large" if norms_of(model) else "no batch norm"}
        torch.manual_seed(0)
        model = build()
        result["outcome"] = "not run"
        for call in calls(model):
            try:
                truth = find_truth(copy.deepcopy(model), call)
            except Exception as error:  # Libraries raise anything for a size that does not suit them.
                result["error"] = _describe(error)
                continue
            result |= {"outcome": "failed", "error": ""}
            result |= examine(model, call, truth) | {"outcome": "surveyed"}
            break
    except Exception as error:
        result["error"] = _describe(error)
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def isolated(task: tuple[str, str], seconds: float) -> Result:
    """Survey one architecture in a process of its own, which takes nothing with it if it dies or hangs."""
    context = multiprocessing.get_context("fork")  # The libraries are imported already.
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(survey(*task)))
    child.start()
    sender.close()
    result: Result = {"library": task[0], "name": task[1], "outcome": "failed", "error": f"over {seconds:.0f} seconds"}
    try:
        result = receiver.recv() if receiver.poll(seconds) else result
    except EOFError:
        result["error"] = "the process died, perhaps for lack of memory"
    child.kill()
    child.join()
    return result


def _line(title: str, results: list[Result]) -> str:
    groups = [group for result in results for group in result["groups"]]
    cells = [title, len(results), sum(result["norms"] for result in results)]
    for kind in (("direct",), ("sum", "slice", "concatenation"), ("computed", "mixed", "none", "not run")):
        here = [group for group in groups if group[0].startswith(kind)]
        cells += [sum(group[3] for group in here), sum(group[3] for group in here if group[1] == "compensated")]
    return f"| {' | '.join(map(str, [*cells, sum(len(result['mismatches']) for result in results)]))} |"


def table(results: list[Result]) -> str:
    """Return the page: a line for each family, what is not compensated and why, and what was not surveyed."""
    heads = "Architectures | Norms | One operator | compensated | Sum, slice or concatenation | compensated"
    lines = [f"| Family | {heads} | Others | compensated | Mismatches |", "|---|" + "--:|" * 9]
    surveyed = [result for result in results if result["outcome"] == "surveyed"]
    for library in LIBRARIES:
        here = sorted((r for r in surveyed if r["library"] == library), key=lambda result: result["family"])
        lines += [_line(f"**{library}**", here)]
        lines += [_line(family, list(group)) for family, group in itertools.groupby(here, lambda r: r["family"])]
    groups = [(result, *group) for result in surveyed for group in result["groups"] if group[1] != "compensated"]
    others = [result for result in results if result["outcome"] not in ("surveyed", "no batch norm")]
    pages = {
        "What is not compensated, and why": [(r, f"{t}: {why}", f"{r['name']} ({n})") for r, t, _, why, n in groups],
        "Mismatches": [(r, m.partition(": ")[2], r["name"]) for r in surveyed for m in r["mismatches"]],
        "What was not surveyed": [(r, f"{r['outcome']}: {r.get('error', '')}".strip(": "), r["name"]) for r in others],
    }
    for title, notes in pages.items():
        lines += ["", f"## {title}", "", "| Library | Reason | Architectures |", "|---|---|---|"]
        found: dict[tuple[str, str], dict[str, None]] = {}
        for result, why, name in notes:
            found.setdefault((result["library"], why), {})[name] = None
        lines += [f"| {library} | {why} | {', '.join(names)} |" for (library, why), names in found.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Survey what the output does not have yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, one for each architecture")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="may be repeated; all by default")
    parser.add_argument("--match", default="*", help="pattern of architectures' names")
    parser.add_argument("--limit", type=int, help="how many architectures to survey, at most")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one architecture")
    parser.add_argument("--table", type=Path, help="Markdown file whose generated part to write")
    options = parser.parse_args()
    ensure_torchvision()
    results = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    done = {(result["library"], result["name"]) for result in results}
    installed = [name for name in options.library or LIBRARIES if importlib.util.find_spec(name)]
    print("Not installed:", ", ".join(set(options.library or LIBRARIES) - set(installed)) or "none")
    tasks = [(library, name) for library in installed for name in (catalogue(library) if options.limit != 0 else ())]
    tasks = [task for task in tasks if task not in done and fnmatch.fnmatch(task[1], options.match)][: options.limit]
    with options.output.open("a") as file, ThreadPoolExecutor(options.workers) as pool:
        for result in pool.map(functools.partial(isolated, seconds=options.timeout), tasks):
            print(json.dumps(result), file=file, flush=True)
            results.append(result)
            print(
                *(result.get(key, "") for key in ("library", "name", "outcome", "error")), result.get("mismatches", "")
            )
    if options.table:
        words = options.table.read_text().split(MARK)[0] if options.table.exists() else ""
        options.table.write_text(f"{words}{MARK}\n\n{table(results)}")


if __name__ == "__main__":
    main()
