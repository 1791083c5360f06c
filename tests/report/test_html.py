"""The page is whole, loads nothing, and says what was found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from caudex.analysis.analyze import analyze
from caudex.analysis.results import Analysis
from caudex.report.html import html_page
from caudex.report.svg import Series, line_plot
from caudex.trace.generate import WorkloadSettings, generate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "br", "line", "polyline", "circle", "rect"}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """A mix with a clock in the system prompt, the same for four requests in a row, and a <script> in a user's text."""
    path = tmp_path_factory.mktemp("log") / "mix.jsonl"
    with path.open("w") as file:
        for number, body in enumerate(
            generate({"chat": 2, "agent": 1}, WorkloadSettings(requests=120, system_words=200))
        ):
            system = body["messages"][0]["content"]
            clock = f" Now 10:{number // 240:02d}:{number // 4 % 60:02d}. "
            first = {**body["messages"][0], "content": system[:600] + clock + system[600:]}
            turns = [first, *body["messages"][1:]]
            turns[1] = {**turns[1], "content": "<script>alert(1)</script> & " + turns[1]["content"]}
            file.write(json.dumps({**body, "messages": turns}) + "\n")
    return analyze(path, model="Llama-3.1-8B", gpu="H100", replicas=2)


class _Balance(HTMLParser):
    """Notes tags that are never closed, or closed in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(analysis: Analysis) -> None:
    page = html_page(analysis)
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert "script" not in parser.tags
    assert not re.search(r"https?://|@import|url\(", page)


def test_what_was_found_is_on_the_page(analysis: Analysis) -> None:
    page = html_page(analysis)
    assert analysis.breakers[0].kind == "clock"
    for text in ("A clock in the prompt", "vllm serve", "clairvoyant bound", "requests share tokens", "10:00:0"):
        assert text in page


def test_a_plot_of_nothing_and_of_one_point() -> None:
    nothing = line_plot([Series("a", [], "s0")], x_label="x", y_label="y", x_text=str)
    assert "Nothing to plot" in nothing
    one = line_plot([Series("a", [(1, 0.5)], "s0", dots=True)], x_label="x", y_label="y", x_text=str, log_x=True)
    assert "NaN" not in one
    assert "circle" in one


PROBE = """
const frame = document.getElementById('page'), page = frame.contentDocument, wide = page.documentElement.scrollWidth;
const seen = element => element.checkVisibility() && element.getBoundingClientRect().height > 0;
const clipped = [...page.querySelectorAll('svg text')].filter(text => {
  const box = text.getBoundingClientRect(), plot = text.closest('svg').getBoundingClientRect();
  return box.width > 0 && (box.left < plot.left || box.right > plot.right + 1 || box.bottom > plot.bottom + 1);
});
let level = [...page.querySelectorAll('.card > details')].find(root => root.querySelector('details')), levels = 0;
level.open = false;
for (; level; level = level.querySelector('details')) {
  const hidden = !seen(level.querySelector('.text'));
  level.querySelector('summary').click();
  levels += hidden && seen(level.querySelector('.text'));
}
const diffs = [...page.querySelectorAll('.diff mark')].filter(seen).length;
document.title = JSON.stringify({
  wide, levels, diffs, clipped: clipped.length, wideOpened: page.documentElement.scrollWidth,
  plots: [...page.querySelectorAll('svg')].filter(plot => plot.getBoundingClientRect().height > 50).length,
  loaded: frame.contentWindow.performance.getEntriesByType('resource').length,
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_all_and_opens_the_tree(analysis: Analysis, width: int, tmp_path: Path) -> None:
    """In a frame, since a window of a browser is never as narrow as a phone."""
    page = escape(html_page(analysis), quote=True)
    frame = f'<iframe id="page" width="{width}" height="800" srcdoc="{page}" style="border: 0"></iframe>'
    file = tmp_path / "frame.html"
    file.write_text(
        f"<!doctype html><body>{frame}<script>addEventListener('load', () => {{{PROBE}}});</script>", encoding="utf-8"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900"]
    command = [str(CHROMIUM), *flags, "--dump-dom", file.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<title>(\{.*?\})</title>", result.stdout)
    assert found is not None, result.stderr[-2000:]
    numbers = json.loads(found[1])
    assert numbers["plots"] == 2
    assert numbers["loaded"] == 0
    assert numbers["clipped"] == 0
    assert numbers["wide"] <= width
    assert numbers["wideOpened"] <= width
    assert numbers["levels"] >= 2
    assert numbers["diffs"] >= 2
