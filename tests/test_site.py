"""The documentation site: it builds without a warning, its links lead somewhere, and it can be read on a phone."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.lab.report.browser import open_in_browser
from tests.support import run_python

ROOT = Path(__file__).parent.parent
WIDTHS = (1200, 390)
PAGES = ["index", *sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"})]

# Pages stand in frames as narrow as a phone. On the narrow ones the menu is opened; then a link in it is followed.
_LOOKING = """<!doctype html>
<meta charset="utf-8">
<pre id="facts"></pre>
{frames}
<script>
addEventListener("load", async () => {{
  const frames = [...document.querySelectorAll("iframe")], facts = [];
  const drawer = frame => frame.contentDocument.querySelector(".sidebar-drawer").getBoundingClientRect().right;
  for (const frame of frames) {{
    const inside = frame.contentDocument, fact = {{
      name: frame.getAttribute("src"), width: frame.contentWindow.innerWidth,
      // On a phone furo's column scrolls by itself, and the page seems to fit whatever is in it.
      overflow: Math.max(...["html", ".content"].map(name => inside.querySelector(name))
        .map(element => element.scrollWidth - element.clientWidth)),
      formulas: inside.querySelectorAll("math").length,
      pictures: [...inside.images].filter(image => image.naturalWidth > 0).length, all_pictures: inside.images.length,
      before: drawer(frame),
    }};
    inside.body.insertAdjacentHTML("beforeend", "<style>* {{ transition: none !important; }}</style>");
    inside.querySelector("label[for=__navigation]").click();
    fact.after = drawer(frame);
    facts.push(fact);
  }}
  const link = frames[0].contentDocument.querySelector('.sidebar-tree a[href$="start.html"]');
  const arrived = new Promise(done => frames[0].addEventListener("load", done));
  link.click();
  await arrived;
  facts.push({{heading: frames[0].contentDocument.querySelector("h1").innerText}});
  document.getElementById("facts").textContent = JSON.stringify(facts);
}});
</script>
"""


def build(site: Path) -> None:
    """Build as `make docs` does."""
    words = ("-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", site)
    run_python(*words, folder=ROOT, variables={"PYTHONPATH": str(ROOT / "src")})


def dead_links(site: Path) -> list[str]:
    """Links and pictures of all pages that are on no page of the site."""
    names, dead = {}, []
    for path in site.rglob("*.html"):
        names[path] = set(re.findall(r'\b(?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))
    for path in names:
        for found in re.findall(
            r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]+)"', path.read_text(encoding="utf-8")
        ):
            address, _, anchor = unquote(unescape(found)).partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            target = (path.parent / address.split("?")[0]).resolve() if address else path
            is_dead = not target.exists() or (anchor and target in names and anchor not in names[target])
            dead += [f"{path.relative_to(site)}: {found}"] if is_dead else []
    return dead


def look(site: Path, profile: Path) -> list[dict[str, Any]]:
    """Return what a browser shows of some pages, at each width."""
    frames = [
        f'<iframe width="{width}" height="800" src="docs/{page}.html"></iframe>' for width in WIDTHS for page in PAGES
    ]
    page = site / "looking.html"
    page.write_text(_LOOKING.format(frames="\n".join(frames)), encoding="utf-8")
    options = ("--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=60000", "--window-size=1300,900")
    opened = open_in_browser(page, profile, *options)
    assert [line for line in opened.console if "rror" in line] == []
    facts = re.search(r'<pre id="facts">(.+?)</pre>', opened.dom, re.DOTALL)
    assert facts is not None
    return json.loads(unescape(facts[1]))


@pytest.mark.slow
def test_site(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build(site)
    assert dead_links(site) == []
    assert "cdn" not in (site / "docs" / "derivation.html").read_text()  # nothing is loaded from elsewhere

    *facts, followed = look(site, tmp_path / "profile")
    assert len(facts) == len(PAGES) * len(WIDTHS)
    for fact in facts:
        assert fact["width"] in WIDTHS
        assert fact["overflow"] <= 0, fact
        assert fact["pictures"] == fact["all_pictures"], fact
        assert (fact["before"] <= 0) == (fact["width"] == 390), fact  # the menu is hidden on a phone
        assert fact["after"] > 0, fact  # until it is asked for
    assert max(fact["formulas"] for fact in facts) > 100
    assert followed["heading"].startswith("Start in five minutes")
