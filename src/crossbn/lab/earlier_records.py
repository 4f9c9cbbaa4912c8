"""Records in the shapes that commands wrote before there was one for all."""

from collections.abc import Callable
from typing import Any


def translate(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record of an earlier shape: the first of `_EARLIER` that fits."""
    made = {name: found.pop(name) for name in ("versions", "machine", "commit") if name in found}
    for marks, of in _EARLIER:
        if marks <= found.keys():
            return {**of(found), "environment": made}
    raise ValueError("no record has these fields")


def _of_table(found: dict[str, Any]) -> dict[str, Any]:
    values = {**found["values"], "seconds": found["seconds"]}
    return {
        "kind": found["experiment"],
        "values": values,
        **{name: found[name] for name in ("name", "seed", "settings")},
    }


def _of_demo(found: dict[str, Any]) -> dict[str, Any]:
    told = {name: found[name] for name in ("norm", "batch_size", "window")}
    curve = [{"epoch": epoch, "test_accuracy": accuracy} for epoch, accuracy in found["curve"]]
    values = {"accuracy": found["curve"][-1][1], "curve": curve}
    values |= {name: found[name] for name in ("test_images", "seconds")}
    return {
        **{"kind": "demo", "name": found["name"], "seed": found["seed"]},
        **{"settings": {**told, **found["settings"]}, "values": values},
    }


def _of(kind: str, *outcome: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the translation of a shape in which settings and values stood side by side."""

    def translate(found: dict[str, Any]) -> dict[str, Any]:
        settings = {name: value for name, value in found.items() if name not in (*outcome, "seed", "kind")}
        values = {name: found[name] for name in outcome if name in found}
        return {"kind": kind, "name": "", "seed": found.get("seed", 0), "settings": settings, "values": values}

    return translate


_TRAINED = ("curve", "tested_images", "seconds", "seconds_per_step", "window_used", "learning_rate_used")
_EARLIER: tuple[tuple[frozenset[str], Callable[[dict[str, Any]], dict[str, Any]]], ...] = (
    (frozenset({"experiment", "norm", "window", "curve", "test_images"}), _of_demo),
    (frozenset({"experiment", "name", "seed", "settings", "values"}), _of_table),
    (frozenset({"curve", "scores", "waiting_share"}), _of("detect", "scores", "waiting_share", *_TRAINED)),
    (frozenset({"curve", "seconds", "accuracy"}), _of("classify", "accuracy", *_TRAINED)),
    (
        frozenset({"model", "norm", "timings", "peak_bytes"}),
        _of("cost", "timings", "peak_bytes", "history_bytes", "paired_weight_bytes", "network_flops", "norm_flops"),
    ),
    (
        frozenset({"step", "layer", "age", "truth"}),
        _of(
            *("diagnose", "channels", "naive_mean_error", "compensated_mean_error", "naive_var_error"),
            *("compensated_var_error", "batch_noise", "invalid", "explained_mean", "explained_var"),
        ),
    ),
    (frozenset({"kind", "findings", "verdict"}), _of("check", "findings", "verdict")),
)
"""Fields that an earlier shape has together, and its translation."""
