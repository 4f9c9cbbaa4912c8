"""Which form of history suits a source."""

from crossbn import functional as C  # the library's F
from crossbn.nn.forms import Form
from crossbn.nn.gradient_form import Gradients
from crossbn.nn.producer import Producer
from crossbn.nn.sample_form import Samples
from crossbn.nn.settings import Settings


def make_form(producers: tuple[Producer, ...], direct: bool, settings: Settings) -> Form | None:
    """Choose the form for the producers of a source; None if nothing is compensated."""
    if settings.order == 0 or not producers:
        return None
    plans = [
        C.choose_plan(producer.geometry, settings.positions, settings.window - 1, settings.order)
        for producer in producers
    ]
    kind = Samples if any(plan.form == "samples" for plan in plans) else Gradients
    amounts = [plan.positions for plan in plans if plan.positions is not None]
    return kind(producers, direct, min(amounts, default=None), settings)
