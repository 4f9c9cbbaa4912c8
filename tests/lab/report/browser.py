"""Pages in a real browser without a window."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    "--hide-scrollbars",  # as on a phone
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)
DARK = "--blink-settings=preferredColorScheme=0"

# Each page stands in a frame, as narrow as a phone where a window cannot be, and is looked at from outside: it has no
# script of its own. The message shows that what is on the console would be seen.
_MEASURING = """<!doctype html>
<meta charset="utf-8">
{frames}
<pre id="facts"></pre>
<script>
addEventListener("load", () => {{
  const facts = [...document.querySelectorAll("iframe")].map(frame => {{
    const inside = frame.contentDocument, all = name => [...inside.querySelectorAll(name)];
    const seen = element => element.getBoundingClientRect().width > 0;
    return {{
      width: frame.contentWindow.innerWidth,
      scroll_width: inside.documentElement.scrollWidth,
      scrolling_tables: all(".wide").filter(box => box.scrollWidth > box.clientWidth).length,
      without_cue: all(".wide").filter(box => box.scrollWidth > box.clientWidth)
        .filter(box => !box.previousElementSibling.matches(".more") || !seen(box.previousElementSibling)).length,
      tables: all("table").filter(seen).length,
      figures: all("figure").filter(seen).length,
      drawings: all("svg").filter(seen).map(svg => svg.viewBox.baseVal.width),
      outside: all("figure svg, pre, dl, p, h1, h2, h3, li").filter(seen)
        .filter(element => element.getBoundingClientRect().right > frame.contentWindow.innerWidth).length,
      letters: Math.min(...all("figure svg").filter(seen).map(svg =>
        10 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
      background: getComputedStyle(inside.body).backgroundColor,
      ink: getComputedStyle(inside.body).color,
      loaded: frame.contentWindow.performance.getEntriesByType("resource").length,
      text: inside.body.innerText,
    }};
  }});
  document.getElementById("facts").textContent = JSON.stringify(facts);
  console.log("measured");
}});
</script>
"""


class Opened(NamedTuple):
    """What a browser made of a file."""

    dom: str
    console: list[str]


def find_browser() -> str:
    """Return a browser's path, or fail the test with what to install."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(f"the pages are opened in a browser: install one of {', '.join(NAMES)} (`make browser`)")
    return found


def open_in_browser(path: Path, profile: Path, *options: str) -> Opened:
    """Open a file; `profile` is an empty folder of the browser's own."""
    words = [find_browser(), *QUIET, f"--user-data-dir={profile}", *options, path.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True)
    return Opened(done.stdout, re.findall(r'CONSOLE[:(]\d+\)?\] "(.*)", source:', done.stderr))


def measure(page: str, widths: Sequence[int], folder: Path, *options: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return facts about a page in frames of these widths, and what was on the console."""
    frames = "\n".join(f'<iframe width="{w}" height="800" srcdoc="{escape(page)}"></iframe>' for w in widths)
    path = folder / "measuring.html"
    path.write_text(_MEASURING.format(frames=frames), encoding="utf-8")
    opened = open_in_browser(path, folder / "profile", "--dump-dom", *options)
    facts = re.search(r'<pre id="facts">(.*?)</pre>', opened.dom, re.DOTALL)
    assert facts is not None
    return json.loads(unescape(facts[1])), opened.console
