"""The picture of how it works fits its boxes in any font."""

from pathlib import Path
from xml.etree import ElementTree

PICTURE = Path(__file__).parents[1] / "docs" / "how-it-works.svg"
SVG = "{http://www.w3.org/2000/svg}"
SHARES = {"start": 0.0, "middle": 0.5, "end": 1.0}  # of a text, what is left of its place


def test_texts_have_a_width_of_their_own_and_stay_in_their_boxes() -> None:
    picture = ElementTree.parse(PICTURE).getroot()
    left, _, width, _ = map(float, picture.attrib["viewBox"].split())
    boxes = [
        tuple(float(each.get(name, 0)) for name in ("x", "y", "width", "height")) for each in picture.iter(f"{SVG}rect")
    ]
    inside = 0
    for group in [picture, *picture.iter(f"{SVG}g")]:
        for text in group.findall(f"{SVG}text"):
            x, y, length = (float(text.attrib[name]) for name in ("x", "y", "textLength"))
            assert text.attrib["lengthAdjust"] == "spacingAndGlyphs", text.text
            start = x - SHARES[group.get("text-anchor", "start")] * length
            assert left <= start <= start + length <= left + width, text.text
            around = [box for box in boxes[1:] if box[0] < x < box[0] + box[2] and box[1] < y < box[1] + box[3]]
            for box in around[-1:]:  # the one on top; the first of all is the paper
                inside += 1
                assert box[0] + 4 <= start <= start + length <= box[0] + box[2] - 4, text.text
    assert inside == 12
