"""Writes a report: the page, pictures of its main charts, and texts that the newest checkpoint writes."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from genesis.base.errors import UserError
from genesis.base.progress import stage
from genesis.base.run_directory import RunDirectory
from genesis.generate.ids import build_writer
from genesis.generate.load import load_decoder
from genesis.generate.sampling_options import SamplingOptions
from genesis.generate.stream import GenerateOptions, generate
from genesis.operations.report.charts import CHARTS
from genesis.operations.report.collect import Run, Sample, collect_runs
from genesis.operations.report.history import draw_timeline
from genesis.operations.report.page import plan_sections, render_page
from genesis.operations.report.style import LIGHT, VARIABLES, Palette, new_figure, styled, to_png, to_svg_file
from genesis.tokenizer.tokenizer import encode_prompt
from genesis_callbacks.base.files import replace_file

OVERVIEW_NAME: Final = "overview.png"
_OVERVIEW_SVG: Final = "overview.svg"
_MAIN: Final = ("bits-per-byte", "loss", "gradient-norm", "tokens-per-second", "learning-rate")
_TEMPERATURE: Final = 0.7
_NUM_TOKENS: Final = 120
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


def build_overview(runs: Sequence[Run], palette: Palette) -> Figure:
    """Returns loss, gradient norm and speed of the runs, and the timeline of the first one."""
    charts = [chart for chart in CHARTS if chart.name in _MAIN and any(chart.is_in(run) for run in runs)]
    charts = sorted(charts, key=lambda chart: _MAIN.index(chart.name))
    charts = [chart for chart in charts if chart.name != "loss" or charts[0] is chart][:3]
    has_timeline = bool(runs[0].events)
    num_panels = max(1, len(charts) + has_timeline)
    with styled(palette):
        figure = new_figure(3.0 * -(-num_panels // 2), 10.0)
        for place, chart in enumerate(charts):
            axes = figure.add_subplot(-(-num_panels // 2), 2, place + 1)
            chart.draw(axes, runs, palette)
            axes.set_title(chart.title, fontsize=11)
            if any(label for label in axes.get_legend_handles_labels()[1]):
                axes.legend(loc="best")
        if has_timeline:
            axes = figure.add_subplot(-(-num_panels // 2), 2, num_panels)
            draw_timeline(axes, runs[0], palette)
            axes.set_title("Checkpoints and crashes", fontsize=11)
    return figure


def write_texts(run: Path, prompts: Sequence[str]) -> list[Sample]:
    """Returns the newest checkpoint's continuation of each prompt, sampled with a fixed seed on the CPU.

    Raises:
        UserError: The run has no checkpoint or no tokenizer.
    """
    loaded = load_decoder(run)
    tokenizer = loaded.text_tokenizer
    options = GenerateOptions(max_new_tokens=_NUM_TOKENS, sampling=SamplingOptions(_TEMPERATURE), seed=0)
    writers, texts = [build_writer(tokenizer) for _ in prompts], list(prompts)
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    for token in generate(loaded.decoder, ids, options, loaded.stop_ids):
        if token.id < tokenizer.vocab_size:  # a model may have more ids, without a text
            texts[token.prompt] += writers[token.prompt].feed(token.id)
        if token.is_last:
            texts[token.prompt] += writers[token.prompt].flush()
    title = f"{loaded.checkpoint.name}, temperature {_TEMPERATURE}"
    return [Sample(title, text) for text in texts]
