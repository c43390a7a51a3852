"""Checks a finished site: each link and anchor within it leads somewhere, and no page loads anything from elsewhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_RESOURCES = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
}
_RESOURCE_LINKS = {
    "stylesheet",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "icon",
    "modulepreload",
    "manifest",
}
_CSS_LOADS = re.compile(r"(?:@import\s*(?:url\()?|url\()\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
_JS_ADDRESSES = re.compile(r"https?://[\w.-]+")

LATE_LOADS = {
    "https://unpkg.com": "diagrams, galleries and code cells",
    "https://cdn.jsdelivr.net": "code cells",
    "https://api.github.com": "figures of a repository",
}
"""Hosts that the theme's script asks where a page has an element of `LATE_ELEMENTS`, and for what."""
LATE_ELEMENTS = re.compile(r'class="[^"]*\b(?:mermaid|glightbox|pyodide|md-source)\b|data-md-component="source"')

NOT_LOADED = {"http://www.w3.org", "https://zensical.org", "https://fontawesome.com"}
"""Namespaces, licences and the generator's name: a browser does not ask these hosts."""


@dataclass
class Page:
    """What a page refers to.

    Attributes:
        ids: Its anchors.
        links: Addresses that a reader may follow.
        resources: Addresses that a browser loads by itself.
    """

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    resources: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.page.ids |= {values[name] for name in ("id", "name") if name in values}
        self.page.resources += [values[name] for of, name in _RESOURCES if of == tag and name in values]
        if tag == "link" and set(values.get("rel", "").split()) & _RESOURCE_LINKS:
            self.page.resources.append(values["href"])
        elif tag == "a" and "href" in values:
            self.page.links.append(values["href"])


def read_page(text: str) -> Page:
    """Returns what a page of HTML refers to.

    Example:
        >>> read_page('<a id="x" href="#x"></a><img src="a.png">')
        Page(ids={'x'}, links=['#x'], resources=['a.png'])
    """
    reader = _Reader()
    reader.feed(text)
    return reader.page


def find_problems(site: Path) -> list[str]:
    """Returns every problem of the site in `site`, in one line each."""
    pages = {path: read_page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if len(pages) < 2:
        return [f"{site} has no pages"]
    problems = [problem for path in pages for problem in _check_page(site, path, pages)]
    return problems + list(find_outside_loads(site))


def _check_page(site: Path, path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    name = path.relative_to(site)
    page = pages[path]
    for address in page.resources:
        if _is_elsewhere(address):
            yield f"{name} loads {address}, which is not part of the site"
        elif not address.startswith("data:") and not _find_target(site, path, address).is_file():
            yield f"{name} loads {address}, which does not exist"
    for address in page.links:
        if _is_elsewhere(address) or urlsplit(address).scheme:
            continue
        target, anchor = _find_target(site, path, address), unquote(urlsplit(address).fragment)
        if not target.is_file():
            yield f"{name} links to {address}, which does not exist"
        elif anchor and target in pages and anchor not in pages[target].ids and not anchor.startswith("__"):
            yield f"{name} links to {address}, but that page has no such anchor"


def find_outside_loads(site: Path) -> Iterator[str]:
    """Yields what style sheets and scripts load from other hosts, as far as that can be seen in them."""
    for path in sorted(site.rglob("*.css")):
        for address in _CSS_LOADS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {address}, which is not part of the site"
    for path in sorted(site.rglob("*.js")):
        for address in sorted(set(_JS_ADDRESSES.findall(path.read_text(encoding="utf-8")))):
            if address not in NOT_LOADED and address not in LATE_LOADS:
                yield f"{path.relative_to(site)} names {address}; find out whether a page loads from it"
    for path in sorted(site.rglob("*.html")):
        element = LATE_ELEMENTS.search(path.read_text(encoding="utf-8"))
        if element is not None:
            yield f"{path.relative_to(site)} has {element[0]!r}, for which the theme's script loads from another host"


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme in ("http", "https") or bool(parts.netloc)


def _find_target(site: Path, page: Path, address: str) -> Path:
    """Returns the file that an address on a page means: that of a directory is its index page."""
    path = unquote(urlsplit(address).path)
    target = page if not path else (site / path.lstrip("/") if path.startswith("/") else page.parent / path)
    return (target / "index.html").resolve() if target.is_dir() else target.resolve()
