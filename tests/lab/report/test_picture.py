import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from crossbn.lab.report.demo_section import plot_curves
from crossbn.lab.report.page import Page
from crossbn.lab.report.picture import THEME, make_picture
from tests.lab.report.on_disk import three_norms


def panels(count: int, title: str = "Over all") -> Figure:
    figure = Figure(figsize=(3 * count, 3), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, count, sharey=True, squeeze=False)[0]):
        axes.plot([0, 1], [0, 1], color="#0072B2", label="blue")
        axes.plot([0, 1], [1, 0], color="#000000", label="black")
        axes.set_title(f"panel {i}", loc="left")
        axes.set_xlabel("steps")
        axes.set_yticks([0.25])
    figure.axes[0].set_ylabel("error")
    figure.suptitle(title)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def size(markup: str) -> tuple[int, int]:
    found = ElementTree.fromstring(markup)
    return int(found.attrib["width"]), int(found.attrib["height"])


def texts(markup: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(markup).iter("text")]


def test_on_a_phone_panels_stand_below_each_other() -> None:
    picture = make_picture(panels(3), "f")
    assert size(picture.wide) == (864, 288)
    width, height = size(picture.narrow)
    assert width == 442
    assert height > 3 * 270
    assert texts(picture.wide).count("error") == 1
    assert texts(picture.narrow).count("error") == 3  # each panel has its own axis now
    assert texts(picture.wide).count("0.25") == 1
    assert texts(picture.narrow).count("0.25") == 3
    assert texts(picture.narrow).count("blue") == texts(picture.wide).count("blue") == 1


def test_title_becomes_the_caption() -> None:
    picture = make_picture(panels(2, "First line\nsecond"), "f")
    assert picture.caption == "First line, second"
    assert "First line" not in "".join(texts(picture.wide))
    assert picture.alternative == ("First line, second. error by steps. Panels: panel 0; panel 1. Shown: blue; black.")
    demo = make_picture(plot_curves(three_norms()), "g")
    assert demo.caption == "During training, mean of 3 seeds, band: ± 1 standard deviation"
    assert demo.alternative.endswith("Shown: BN at batch 32: 95.0; BN at batch 2: 41.0; CBN at batch 2: 94.0.")


def test_nothing_reaches_outside_and_no_two_parts_share_a_name() -> None:
    pictures = [make_picture(panels(2), name) for name in ("a", "b")]
    names = [name for each in pictures for markup in each[2:] for name in re.findall(r' id="([^"]+)"', markup)]
    assert len(names) == len(set(names)) > 8
    for markup in (each for picture in pictures for each in picture[2:]):
        used = re.findall(r'(?:href="|url\()#([^")]+)', markup)
        assert used
        assert set(used) <= set(re.findall(r' id="([^"]+)"', markup))
        assert not re.search("http|<style|<metadata|font-family", markup)
        assert markup.startswith("<svg ")


def test_colours_are_the_page_s() -> None:
    markup = make_picture(panels(1), "f").wide
    assert "stroke: var(--blue)" in markup
    assert "stroke: var(--ink)" in markup
    assert not any(colour in markup for colour in THEME)
    page = Page("", []).html()
    for day, (name, night) in THEME.items():
        assert f" --{name}: {day};" in page
        assert f" --{name}: {night};" in page.partition("prefers-color-scheme: dark")[2]
