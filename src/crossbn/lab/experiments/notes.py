"""What is said of the numbers of an experiment: the paragraphs of `notes.md`."""

from functools import cache
from importlib import resources

from crossbn.lab.experiments.experiment import Scale


@cache
def _read() -> list[tuple[str, list[str], list[str]]]:
    """Return name, scales and paragraphs of each section; its heading is a name, or a name and scales."""
    text = resources.files(__package__).joinpath("notes.md").read_text(encoding="utf-8")
    sections = []
    for section in f"\n{text}".split("\n# ")[1:]:
        heading, *paragraphs = section.strip().split("\n\n")
        name, _, scales = heading.partition(": ")
        sections.append((name, scales.split(), [" ".join(each.split()) for each in paragraphs]))
    return sections


def notes_of(name: str, scale: Scale, **values: object) -> list[str]:
    """Return the paragraphs of a name at a scale, with values in their places; none if there are none.

    Example:
        >>> notes_of("norms", Scale.SMALL, size=2)
        ['Batches of 2 where nothing else is said.']
    """
    found = [each for own, scales, each in _read() if own == name and (not scales or scale.value in scales)]
    return [paragraph.format(**values) for each in found for paragraph in each]
