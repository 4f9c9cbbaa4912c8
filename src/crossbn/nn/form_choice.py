"""Which form of history suits a source."""

from crossbn import functional as C  # the library's F
from crossbn.nn.forms import Form
from crossbn.nn.gradient_form import Gradients
from crossbn.nn.sample_form import Samples
from crossbn.nn.settings import Settings
from crossbn.nn.term import Term


def make_form(terms: tuple[Term, ...], settings: Settings) -> Form | None:
    """Choose the form for the operators of a source; None if nothing is compensated."""
    if settings.order == 0 or not terms:
        return None
    plans = [C.choose_plan(term.geometry, settings.positions, settings.window - 1, settings.order) for term in terms]
    kind = Samples if any(plan.form == "samples" for plan in plans) else Gradients
    amounts = [plan.positions for plan in plans if plan.positions is not None]
    return kind(terms, min(amounts, default=None), settings)
