"""Writes a report: the page, and pictures of its main charts."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.operations.report.collect import collect_runs
from genesis.operations.report.overview import build_overview
from genesis.operations.report.page import plan_sections, render_page
from genesis.operations.report.style import LIGHT, VARIABLES, to_png, to_svg_file
from genesis.operations.report.texts import write_texts
from genesis_callbacks.base.files import replace_file

OVERVIEW_NAME: Final = "overview.png"
_OVERVIEW_SVG: Final = "overview.svg"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9-]")


def write_report(paths: Sequence[Path], out: Path, png: Path | None = None, prompts: Sequence[str] = ()) -> list[Path]:
    """Writes the report of runs; returns the written files, the page first.

    Args:
        paths: Directories of the runs.
        out: The page.
        png: The directory for pictures of all charts but those of other metrics; None for no pictures.
        prompts: Texts that the newest checkpoint of each run continues.

    Raises:
        UserError: A run has no log, or no checkpoint for the prompts, or a file cannot be written.
    """
    _check(out, png)
    with stage("reading the logs"):
        runs = collect_runs(paths)
    if prompts:
        with stage("writing texts"):
            runs = [replace(run, samples=[*write_texts(run.path, prompts), *run.samples]) for run in runs]
    sections = plan_sections(runs)
    written = [out]
    with stage("drawing the page"):
        # A link in a run's own directory is replaced: others may have made it.
        place = out if out in [RunDirectory(path).report for path in paths] else out.resolve()
        _write(place, render_page(runs, sections, time.time()).encode("utf-8", errors="replace"))
    if png is not None:
        _write(png / OVERVIEW_NAME, to_png(build_overview(runs, LIGHT)))
        _write(png / _OVERVIEW_SVG, to_svg_file(build_overview(runs, VARIABLES)))
        written += [png / OVERVIEW_NAME, png / _OVERVIEW_SVG]
        drawings = [drawing for section in sections if not section.is_closed for drawing in section.drawings]
        with stage("drawing pictures", len(drawings), "pictures") as shown:
            for drawing in shown.each(drawings):
                path = png / f"{_UNSAFE.sub('-', drawing.name)}.png"
                _write(path, to_png(drawing.build(LIGHT)))
                written.append(path)
    return written


def _check(out: Path, png: Path | None) -> None:
    """Refuses places that cannot be written before a long log is read."""
    if out.is_dir():
        raise UserError(f"--out {out} is a directory; give the name of a file, such as {out / 'report.html'}")
    if out.exists() and not out.is_file():  # a rename would put a file in the place of /dev/null
        raise UserError(f"--out {out} is a device or a pipe; give the name of a file, such as report.html")
    for directory in (out.parent, *([png] if png is not None else [])):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory} cannot be made: {error.strerror}; give another place") from error


def _write(path: Path, data: bytes) -> None:
    try:
        replace_file(path, data, has_rivals=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another place by --out or --png") from error
