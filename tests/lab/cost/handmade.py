"""Records with chosen numbers, and networks small enough to count by hand."""

from torch import nn

from crossbn.lab.cost import Case, CostRecord, Flops, Precision, Timing

QUICK = Precision(rounds=6, tolerance=1e9)


def tiny_network() -> nn.Sequential:
    """Images [N, 3, 6, 6]; weights of 3*8*9 and 8*4*1 numbers feed the norms."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1, bias=False),
        nn.BatchNorm2d(4),
    )


def case(**changes: object) -> Case:
    told = {"model": "tiny", "input_shape": (3, 6, 6), "batch_size": 2, "window": 3, "precision": QUICK, "threads": 1}
    return Case(**{**told, **changes})  # type: ignore[arg-type]


def timing(ratio: float, half: float = 0.0) -> Timing:
    seconds = ratio / 100
    return Timing(seconds, seconds, seconds, ratio, ratio - half, ratio + half, 20)


def records(of: Case, **ratios: float) -> list[CostRecord]:
    """A record for each norm of the case; the time of a training step is `ratios` times BN's 10 ms."""
    made = []
    for norm in of.norms:
        ratio = ratios.get(norm, 1.0)
        timings = {"train": timing(ratio, 0.01), "eval": timing(1.0)}
        if norm != "gn":
            timings["folded"] = timing(0.9)
        if norm == "cbn":
            timings["burn_in"] = timing(1.02, 0.01)
        peak, history = (1_100_000, 200_000) if norm == "cbn" else (1_000_000, 0)
        flops = Flops(3_000_000, 6_000_000), Flops(40_000, 50_000)
        made.append(CostRecord(of, norm, False, timings, peak, history, 100_000, *flops))
    return made
