"""The built site in a real browser: what a visitor sees, at two widths, in light and in dark.

It reads `site/` as it is on disk (`make docs` writes it; `MUONFX_SITE` names another folder) and opens it from
`file://`, as someone does who has downloaded it. All pages are looked at in light, but of the decisions, which have one
form, every fourth; so has the API, of which every fourth page is also looked at in a narrow window. In dark, where only
the colours can differ, it is every sixth page, and every eighth of the API and of the decisions. Of the listings of
source code it is every sixteenth in light and every eighth in dark.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = Path(os.environ.get("MUONFX_SITE", ROOT / "site")).resolve()
SURVEY = (Path(__file__).parent / "survey.js").read_text(encoding="utf-8")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MOST_SCREENS = 8
"""The largest height of a page of the API in a wide window, in screens."""
ONE_CLASS = {"optimizer.html": 9}
"""The largest height of a page with one class, which cannot be split, in screens."""
WINDOWS = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium that the machine has: playwright's own would have to be downloaded."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (make setup)"
    )
    program = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(CHROMIUMS)} is on PATH")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the built site."""
    if not (SITE / "index.html").exists():
        pytest.skip(f"there is no site in {SITE} (make docs)")
    return SITE


def pages() -> list[Path]:
    """All pages of the site, without the files that Sphinx writes for its own use."""
    found = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html"))
    return [path for path in found if path.parts[0] not in ("_static", "_sources")]


def of(folder: str) -> list[Path]:
    """The pages of a folder of the site."""
    return [page for page in pages() if page.parts[0] == folder]


def but(*folders: str) -> list[Path]:
    """The pages that lie in none of these folders."""
    return [page for page in pages() if page.parts[0] not in folders]


@dataclass
class Visit:
    """The faults that were found, and the files that the pages refer to."""

    wrong: list[str] = field(default_factory=list)
    links: dict[Path, set[str]] = field(default_factory=dict)
    ids: dict[Path, set[str]] = field(default_factory=dict)


def visit(browser: Any, theme: str, chosen: list[Path]) -> Visit:
    """Open pages one after the other, at both widths."""
    seen = Visit()
    context = browser.new_context(
        color_scheme=theme, viewport=WINDOWS["wide"], reduced_motion="reduce"
    )
    tab = context.new_page()
    current = Path()

    def on_request(request: Any) -> None:
        if urlsplit(request.url).scheme not in ("file", "data", "blob"):
            seen.wrong.append(f"{current}: asks for {request.url}")

    def on_failure(request: Any) -> None:
        # The next page was opened before it was loaded.
        if "ERR_ABORTED" not in (request.failure or ""):
            seen.wrong.append(f"{current}: found nothing at {request.url}")

    def on_console(message: Any) -> None:
        if message.type == "error":
            seen.wrong.append(f"{current}: console: {message.text}")

    tab.on("request", on_request)
    tab.on("requestfailed", on_failure)
    tab.on("console", on_console)
    tab.on("pageerror", lambda error: seen.wrong.append(f"{current}: error: {error}"))
    wide_only = [page for index, page in enumerate(of("api")) if index % 4]
    for current in chosen:
        tab.set_viewport_size(WINDOWS["wide"])
        tab.goto((SITE / current).as_uri(), wait_until="load")
        screens = tab.evaluate("document.documentElement.scrollHeight / innerHeight")
        most_screens = ONE_CLASS.get(current.name, MOST_SCREENS)
        if current.parts[0] == "api" and current.name != "index.html" and screens > most_screens:
            seen.wrong.append(
                f"{current}: {screens:.1f} screens, expected at most {most_screens}: split the page"
            )
        for name, window in WINDOWS.items():
            if name == "narrow" and current in wide_only:
                continue
            tab.set_viewport_size(window)
            answer = tab.evaluate(SURVEY)
            seen.wrong += [
                f"{current} ({theme}, {name}): {kind}: {what}" for kind, what in answer["found"]
            ]
            if (answer["background"] > 0.5) != (theme == "light"):
                seen.wrong.append(f"{current} ({theme}, {name}): a background of the other theme")
        seen.links[current] = set(answer["links"])
        seen.ids[current] = set(answer["ids"])
    context.close()
    return seen


def lines(wrong: list[str]) -> str:
    return "\n".join([f"{len(wrong)} found", *wrong[:60]])


def broken_links(seen: Visit) -> list[str]:
    """Links within the site that lead to no file, or to no place on a page."""
    broken: list[str] = []
    for page, links in seen.links.items():
        for link in sorted(links):
            address, anchor = urldefrag(link)
            if urlsplit(address).scheme != "file":
                continue
            target = Path(unquote(urlsplit(address).path))
            if not target.is_file():
                broken.append(f"{page}: there is no {target}")
            elif anchor and target.is_relative_to(SITE):
                ids = seen.ids.get(target.relative_to(SITE))
                if ids is not None and unquote(anchor) not in ids | {"top", "__toc"}:
                    broken.append(f"{page}: {target.relative_to(SITE)} has no #{anchor}")
    return broken


def test_pages_read_well_in_light_are_short_and_their_links_lead_somewhere(
    browser: Any, site: Path
):
    seen = visit(
        browser, "light", but("_modules", "decisions") + of("decisions")[::4] + of("_modules")[::16]
    )
    wrong = seen.wrong + broken_links(seen)
    assert not wrong, lines(wrong)


def test_pages_read_well_in_dark(browser: Any, site: Path):
    many = ("api", "decisions", "_modules")  # the pages of each have one form
    seen = visit(
        browser, "dark", but(*many)[::6] + [page for folder in many for page in of(folder)[::8]]
    )
    assert not seen.wrong, lines(seen.wrong)


SEARCHES = {
    "momentum": "api/transforms-adaptive.html",
    "learning rate": "concepts/hyperparameters.html",
    "fsdp": "sharding.html",
    "bf16": "concepts/numerics.html",
    "nesterov": "setting-the-numbers.html",
    "weight decay": "setting-the-numbers.html",
    "EMA": "api/transforms-around.html",
    "mixed precision": "mixed-precision.html",
    "torch.compile": "compile.html",
    "clip": "api/transforms-decay.html",
    "freeze": "torch-optimizer.html",
    "checkpoint format": "checkpoint-reliability.html",
    "moe": "fused-weights.html",
    "cuda": "gpu.html",
    "install": "getting-started.html",
    "resume": "checkpoints.html",
    "qkv": "fused-weights.html",
    "warmup": "api/schedules.html",
    "gradient accumulation": "api/transforms-around.html",
    "tensor parallel": "sharding.html",
    "deepspeed": "deepspeed.html",
    "NorMuon": "muon-variants.html",
    "trl": "huggingface.html",
    "param groups": "torch-optimizer.html",
    "DiLoCo": "local-steps.html",
    "offload": "offload.html",
}


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page_of_a_word_first(browser: Any, site: Path, query: str):
    tab = browser.new_page()
    tab.goto(f"{(site / 'search.html').as_uri()}?q={query.replace(' ', '+')}")
    first = tab.locator("#search-results ul.search li a").first
    first.wait_for(timeout=60_000)
    page = Path(unquote(urlsplit(first.evaluate("link => link.href")).path)).relative_to(site)
    # An excerpt, also from disk.
    tab.locator("#search-results ul.search p.context").first.wait_for(timeout=60_000)
    tab.close()
    assert page.as_posix() == SEARCHES[query]
