"""How the page looks: on a screen by day and by night, on a phone, on paper."""

_COLOURS = {
    # Of matplotlib's drawings and of the page: by day (and on paper), by night.
    "--ink": ("#000000", "#e6e6e6"),
    "--grey": ("#555555", "#a8adb3"),
    "--rule": ("#777777", "#8b9096"),
    "--vermilion": ("#d55e00", "#ff8a3d"),
    "--blue": ("#0072b2", "#5cb3f0"),
    "--green": ("#009e73", "#2ecba0"),
    "--purple": ("#cc79a7", "#e39dc4"),
}
THEME = {day: name for name, (day, _) in _COLOURS.items()}
"""By the colour that a figure is drawn in: the page's name for it."""


def _variables(night: bool) -> str:
    page = ("--paper: #15181c; --line: #3a4046; --shade: #20252b;", "--paper: #fff; --line: #ccc; --shade: #f3f3f3;")
    return " ".join([*(f"{name}: {pair[night]};" for name, pair in _COLOURS.items()), page[not night]])


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(night=False)} }}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(night=True)} }} }}\n"
    """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { max-width: 62rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p, nav, dl, pre { max-width: 44rem; }
p { margin: .5rem 0; }
a { color: var(--blue); }
nav ol { margin: 0; padding-left: 2rem; }
section { margin-top: 2.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
footer { margin-top: 2.5rem; }
section.page { margin-top: 0; padding-top: 0; border-top: 0; }
figure { margin: 1.25rem 0; }
figcaption, .title { font-weight: 600; margin: 1.25rem 0 .4rem; }
svg { display: block; max-width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { fill: currentColor; font-family: system-ui, sans-serif; }
.narrow { display: none; }
.wide { overflow-x: auto; margin: .4rem 0 1.25rem; }
.wide:focus-visible { outline: 2px solid var(--blue); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: baseline; border-bottom: 1px solid var(--line); }
thead th { font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; text-align: left; min-width: 7rem; max-width: 22rem; }
th:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
td { white-space: nowrap; }
td.words { white-space: normal; min-width: 12rem; }
.words { text-align: left; }
pre { padding: .75rem; background: var(--shade); white-space: pre-wrap; font-size: .875rem; }
pre span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: fit-content(40%) 1fr; gap: .2rem 1rem; margin: .25rem 0; font-size: .9rem; }
dt { color: var(--grey); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
@media screen and (max-width: 42rem) {
  .narrow { display: block; }
  .broad { display: none; }
  table { font-size: .8rem; }
  tbody th { position: sticky; left: 0; background: var(--paper); }
  th, td { padding-inline: .35rem; }
  tbody th { max-width: 9rem; }
}
@page { margin: 16mm 14mm; }
@media print {
  html { font-size: 9.5pt; }
  body { max-width: none; padding: 0; color: #000; background: #fff; }
  a { color: inherit; text-decoration: none; }
  p, nav, dl, pre { max-width: none; }
  h1, h2, h3, .title, figcaption { break-inside: avoid; break-after: avoid; }
  p { orphans: 3; widows: 3; }
  figure, table, tr, pre, dt, dd { break-inside: avoid; }
  .wide { overflow: visible; }
  svg { max-height: 8cm; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .35rem; }
  section { margin-top: 8mm; }
}
"""
)
"""The page's style sheet."""
