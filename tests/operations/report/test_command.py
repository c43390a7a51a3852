"""`genesis report`: what the page holds, and what is refused in one line."""

import base64
import hashlib
import html
import itertools
import json
import os
import re
import shutil
import threading
import xml.etree.ElementTree
from pathlib import Path

import pytest

from genesis.base.determinism import UNREPEATABLE
from genesis.base.errors import UserError
from genesis.cli.report import main
from genesis.operations.report import page
from genesis.operations.report.charts import CHARTS, find_restarts, plan_lines
from genesis.operations.report.collect import collect_runs
from genesis.operations.report.history import find_attempts
from genesis.operations.report.memory import plan_memory
from genesis.operations.report.plot import read_plot
from genesis.operations.report.style import VARIABLES, to_svg
from genesis.operations.report.tiles import plan_tiles
from genesis_callbacks.base.events import Event, encode_event
from genesis_callbacks.base.run_directory import RunDirectory
from tests.operations.report.runs import BEGIN_SECONDS, KEYS, row_of, write_events, write_log, write_run

HOSTILE = "_名\x1b<script>alert(1)</script>\"'&$x^2$]]>"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "_MAX_OTHERS", 2)  # each chart takes a tenth of a second
    return write_run(tmp_path / "runs/mine")


def report(*arguments: str) -> str:
    assert main([*arguments, "--out", "out.html"]) == 0
    return Path("out.html").read_text()


def refuse(*arguments: str) -> str:
    with pytest.raises(UserError) as refused:
        main(list(arguments))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def charts_of(shown: str) -> set[str]:
    return set(re.findall(r'<figure id="([^"]+)"', shown))


def test_the_page_has_every_chart_that_the_run_has_values_for(run: Path) -> None:
    shown = report("mine")
    assert {
        *("loss", "loss-tokens-seen", "loss-tokens-updated", "learning-rate", "gradient-norm", "tokens-per-second"),
        *("mfu", "memory", "step-time-0", "timeline-0", "data", "memory-plan-0"),
    } <= charts_of(shown)
    assert "Left out: Evaluations: there are none" in html.unescape(shown)
    assert "steps wait for data" in shown  # a symptom: 20 of 100 ms
    assert "max_steps: 30" in shown


@pytest.mark.slow
def test_the_page_runs_no_script_but_its_own_and_asks_for_nothing(run: Path) -> None:
    shown = report("mine")
    (script,) = re.findall(r"<script>(.*?)</script>", shown, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src" in shown
    assert shown.lower().count("<script") == 1
    rest = shown.replace(script, "")
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*""", rest) == []
    assert re.findall(r"url\((?!#)|@import", rest) == []
    targets = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', rest))
    assert targets
    assert targets <= set(re.findall(r'id="([^"]+)"', shown))


def test_tiles_have_the_figures_of_the_run_and_a_kill_is_a_kill(run: Path) -> None:
    tiles = {tile.label: tile.value for tile in plan_tiles(collect_runs([run])[0])}
    assert tiles == {
        "Held-out loss": f"{2 + 6 * 0.9**30:.4f}",
        "Training loss": f"{2 + 6 * 0.9**30:.4f}",
        "Tokens per second": "5,016",
        "Training time": "2 min 40 s",  # a minute until the kill's last event, then 100 s
        "Parameters": "25.8k",
        "Device": "",  # no checkpoint names it
        "Interruptions": "1 kill",
    }


def test_the_script_gets_the_values_of_the_log(run: Path) -> None:
    runs = collect_runs([run])
    (loss, *_), _ = plan_lines(runs, CHARTS[:1])
    figure = loss.build(VARIABLES)
    to_svg(figure, "loss")
    plot = read_plot(figure, ["mine"])
    assert plot
    by_label = {one["label"]: one["points"] for one in plot["series"]}
    assert by_label["training"][::2] == [float(step) for step in range(1, 31)]
    assert by_label["training"][1::2] == pytest.approx([2 + 6 * 0.9**step for step in range(1, 31)], rel=1e-5)
    assert by_label["held-out"][::2] == [10, 20, 30]
    assert (by_label["resumed"][0], plot["clock"], plot["has_zoom"]) == (10, "step", True)


@pytest.mark.slow
def test_a_hostile_run_cannot_end_the_attribute_that_the_script_reads(tmp_path: Path, run: Path) -> None:
    other = write_run(tmp_path / "runs" / HOSTILE.replace("/", ""))
    shown = report("mine", str(other))
    assert shown.count("<script") == 1
    for text in re.findall(r'data-plot="([^"]+)"', shown):
        assert json.loads(html.unescape(text))["series"]


@pytest.mark.slow
def test_names_texts_and_recipes_of_a_hostile_run_stay_text(tmp_path: Path, run: Path) -> None:
    name = HOSTILE.replace("/", "")
    other = write_run(tmp_path / "runs" / name)
    (other / "config.yaml").write_text(f"a: {HOSTILE}\n")
    header = ",".join(KEYS).replace("books", "<b>bold</b>")
    (other / "metrics.csv").write_text(f"{header},train/<i>x</i>\n{row_of(1)},1\n{row_of(2)},2\n")
    (other / "rollouts").mkdir()
    (other / "rollouts/1.rank-0.jsonl").write_text(
        '{"prompt": "<img src=x>", "text": "<script>alert(2)</script>"}\nnot json\n'
    )
    shown = report("mine", str(other))
    shown = re.sub(r"<script>\n?// Values under.*?</script>", "", shown, flags=re.DOTALL)
    for forbidden in ("<script", "<b>bold", "<i>x", "<img"):
        assert forbidden not in shown
    assert "&lt;script&gt;alert(2)" in shown
    assert html.escape("<b>bold</b>") in shown


def test_several_runs_are_drawn_over_each_other_and_what_one_lacks_is_named(tmp_path: Path, run: Path) -> None:
    other = tmp_path / "runs/other"
    write_log(other, [])
    (other / "metrics.csv").write_text("step,train/loss\n1,5.0\n2,4.0\n")
    (other / "config.yaml").write_text("trainer: {max_steps: 99}\n")
    shown = html.unescape(report("mine", "other"))
    loss = shown[shown.index('<figure id="loss"') :]
    loss = loss[: loss.index("</figure>")]
    assert 'class="run-0"' in loss
    assert 'class="run-1"' in loss
    assert "other: training" in loss
    assert re.search(r'<figure id="mfu"[^>]*><h3>MFU</h3><figcaption>not logged by other', shown)
    assert "Left out: Timeline: other has no events." in shown
    assert re.search(r"<td>trainer.max_steps</td><td[^>]*>30</td><td[^>]*>99</td>", shown)


def test_a_start_without_an_end_was_killed(run: Path) -> None:
    (collected,) = collect_runs([run])
    assert [attempt.end for attempt in find_attempts(collected)] == ["killed", "ended"]


def test_a_run_whose_kernels_need_not_repeat_is_named(run: Path) -> None:
    assert f"{UNREPEATABLE}." not in collect_runs([run])[0].notes
    recipe = run / "config.yaml"
    recipe.write_text(recipe.read_text().replace("accelerator: cpu", "accelerator: gpu, deterministic: false"))
    assert f"{UNREPEATABLE}." in collect_runs([run])[0].notes


def test_a_run_that_gave_up_kernels_that_repeat_in_a_resume_is_named(run: Path) -> None:
    (run / "config.resume-1.yaml").write_text("trainer: {accelerator: gpu, deterministic: false}")
    assert f"{UNREPEATABLE}." in collect_runs([run])[0].notes


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path, run: Path) -> None:
    write_events(tmp_path / "runs/new")
    shown = report("new")
    assert "The run has no metrics.csv yet." in shown
    assert charts_of(shown) == {"timeline-0"}


@pytest.mark.slow
def test_a_long_log_is_thinned_and_the_page_says_so(run: Path) -> None:
    short = len(report("mine"))
    write_log(run, [row_of(step) for step in range(1, 6001)])
    long = report("mine")
    assert "of which the lowest and highest of each" in long
    assert len(long) < 5 * short


@pytest.mark.slow
def test_pictures_are_written_beside_the_page(run: Path) -> None:
    report("mine", "--png", "pictures")
    names = {path.name for path in Path("pictures").iterdir()}
    assert {"overview.png", "overview.svg", "loss.png", "gradient-norm.png"} <= names
    assert {"step-time-0.png", "timeline-0.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("pictures").glob("*.png"))
    overview = Path("pictures/overview.svg").read_text()
    assert xml.etree.ElementTree.fromstring(overview).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in overview


def test_a_misspelt_run_is_refused_with_the_nearest(run: Path) -> None:
    assert refuse("mien") == "there is no run 'mien'; did you mean mine?"
    assert "genesis runs" in refuse("nothing-like-it")


def test_a_run_without_logs_is_refused_with_the_remedy(tmp_path: Path, run: Path) -> None:
    (tmp_path / "runs/empty").mkdir()
    said = refuse("mine", "empty")
    assert said.startswith("runs/empty has no metrics.csv and no events")
    assert "give the directory of a run" in said
    assert not Path("report.html").exists()


@pytest.mark.slow
def test_a_device_or_a_pipe_is_never_replaced_and_a_link_stays(run: Path) -> None:
    os.mkfifo("pipe")
    assert refuse("mine", "--out", "pipe").startswith("--out pipe is a device or a pipe; give the name of a file")
    assert Path("pipe").is_fifo()
    Path("link").symlink_to("target.html")
    assert main(["mine", "--out", "link"]) == 0
    assert Path("link").is_symlink()
    assert Path("target.html").is_file()


def test_what_cannot_be_written_is_refused_before_the_log_is_read(run: Path) -> None:
    (run / "metrics.csv").write_text("never read")
    assert refuse("mine", "--out", ".") == "--out . is a directory; give the name of a file, such as report.html"
    assert refuse("mine", "--out", "runs/mine/config.yaml/out.html").startswith("runs/mine/config.yaml cannot be made")
    assert "cannot be made: Not a directory" in refuse("mine", "--png", "runs/mine/config.yaml/x")


def test_a_run_that_is_given_twice_and_too_many_runs_are_refused(tmp_path: Path, run: Path) -> None:
    assert refuse("mine", "runs/mine") == "a run is given twice; give each run once"
    for number in range(9):
        shutil.copytree(run, tmp_path / f"runs/r{number}")
    assert refuse(*(f"r{number}" for number in range(9))).startswith("9 runs are too many")


@pytest.mark.slow
def test_damaged_evaluations_and_a_damaged_recipe_leave_their_part_out(run: Path) -> None:
    (run / "evaluations/step-1").mkdir(parents=True)
    (run / "evaluations/step-1/a.json").write_text("{")
    (run / "config.yaml").write_bytes(b"\xff\xfe: [")
    shown = html.unescape(report("mine"))
    assert "Evaluations are left out: " in shown
    assert "Left out: Memory against the plan: no plan of config.yaml" in shown
    assert "loss" in charts_of(shown)


@pytest.mark.parametrize(
    "recipe",
    [
        "[1, 2]",
        "model: 3",
        "model: {decoder: {num_layers: 1000000000}}",
        "model: {decoder: {num_layers: 2}}",
        "a: [" * 200,
    ],
)
def test_a_recipe_without_a_plan_costs_one_chart_and_a_line(run: Path, recipe: str) -> None:
    (run / "config.yaml").write_text(recipe)
    drawings, (line,) = plan_memory(collect_runs([run]))
    assert drawings == []
    assert line.startswith("Memory against the plan: no plan of config.yaml: ")
    assert "\n" not in line


@pytest.mark.slow
def test_events_of_a_hostile_or_torn_file_stay_text_or_are_left_out(tmp_path: Path, run: Path) -> None:
    file = RunDirectory(run).event_file(0)
    hostile = Event("crashed", BEGIN_SECONDS + 70, 70.0, 0, step=12, text=HOSTILE, checkpoint="<b>x</b>")
    hang = Event("hang", BEGIN_SECONDS + 80, 80.0, 1, step=12, text="<img src=x onerror=alert(1)>")
    whole = file.read_bytes()
    file.write_bytes(whole + encode_event(hostile) + encode_event(hang) + b'{"kind": "sav')
    shown = report("mine")
    shown = re.sub(r"<script>\n?// Values under.*?</script>", "", shown, flags=re.DOTALL)
    for forbidden in ("<script", "<b>x", "<img", "\x1b"):
        assert forbidden not in shown
    assert html.escape("<img src=x onerror=alert(1)>") in shown
    file.write_bytes(b"\x00\xff" * 100 + b"\n[1]\n{}\n" + whole[: len(whole) // 2])
    assert "timeline-0" in charts_of(report("mine"))
    file.write_bytes(b"")
    assert "Left out: Timeline: mine has no events." in html.unescape(report("mine"))


@pytest.mark.slow
def test_runs_with_odd_names_have_a_page(tmp_path: Path, run: Path) -> None:
    names = (" ", "--out", "a\nb", "_", "$x^2$", "%s{0}", "é" * 100, "\udcff")
    for name in names:
        shutil.copytree(run, tmp_path / "odd" / name)
    assert {"loss", "timeline-7"} <= charts_of(report(*(f"odd/{name}" for name in names)))


@pytest.mark.slow
def test_a_run_that_is_still_writing_has_a_page_of_what_was_complete(run: Path) -> None:
    log, stopped = run / "metrics.csv", threading.Event()

    def write() -> None:
        with log.open("a") as file:
            for step in itertools.count(31):
                if stopped.is_set():
                    return
                line = row_of(step) + "\n"
                for part in (line[:40], line[40:]):
                    file.write(part)
                    file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        shown = report("mine")
    finally:
        stopped.set()
        writer.join()
    assert "damaged" not in shown
    assert "loss" in charts_of(shown)


def test_a_link_in_the_place_of_the_page_is_replaced_and_what_it_leads_to_stays(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.write_text("mine")
    (run / "report.html").symlink_to(other)
    assert main([str(run)]) == 0
    assert other.read_text() == "mine"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_start_from_the_checkpoint_of_another_run_is_not_drawn_as_a_resume(run: Path) -> None:
    base = Event("restored", BEGIN_SECONDS, 0.0, 0, step=0, checkpoint="../../base/checkpoints/step-00000000")
    with RunDirectory(run).event_file(0).open("ab") as file:
        file.write(encode_event(base))
    (found,) = collect_runs([run])
    assert find_restarts(found) == [10]


def write_episodes(run: Path, position: int, reward: float) -> None:
    asked, call = {"role": "user", "content": "<b>Guess.</b>"}, [{"function": {"name": "look", "arguments": "{}"}}]
    turns = [
        {"role": "assistant", "content": "4", "tool_calls": call, "reward": 0.0},
        {"role": "tool", "content": "Higher."},
        {"role": "assistant", "content": "5", "reward": reward},
    ]
    line = {"prompt": "numbers 1", "answer": 1, "messages": [asked], "turns": turns, "text": "", "reward": reward}
    (run / "rollouts").mkdir(exist_ok=True)
    lines = [json.dumps(line | {"reward_game": reward, "ending": "done"}), '{"turns": 5}', '{"turns": [6]}']
    (run / f"rollouts/{position:010d}.rank-0.jsonl").write_text("\n".join(lines) + "\n")


def test_rewards_are_drawn_by_name_and_episodes_stand_side_by_side(tmp_path: Path, run: Path) -> None:
    names = ("reward_game", "reward_game_spread", "reward_game_no_signal", "reward_short", "turns")
    header = "step," + ",".join(f"train/{name}" for name in names)
    (run / "metrics.csv").write_text(f"{header}\n1,0.25,0.5,0,1,2\n2,0.75,0.5,0,1,3\n")
    for position, reward in ((0, 0.25), (16, 0.5), (32, 1.0)):
        write_episodes(run, position, reward)
    shown = report("mine")
    assert "<h2>Rewards and answers</h2>" in shown
    assert {"rewards", "turns"} <= set(re.findall(r'<figure id="([\w-]+)"', shown))
    assert "train/reward_short" not in shown  # among the other metrics
    table = shown[shown.index("Episodes side by side") :]
    assert re.findall(r"<th>(.*?)</th>", table)[:2] == ["position 0", "position 32"]
    assert table.index("reward 0.25") < table.index("reward 1.0, ending done, reward_game 1")
    assert "assistant, reward 1</div><pre>5</pre>" in table
    assert "&lt;b&gt;Guess.&lt;/b&gt;" in table
    assert "look" in table
    other = tmp_path / "runs/other"
    write_log(other, [])
    write_episodes(other, 48, 0.75)
    table = report("mine", "other")
    table = table[table.index("Episodes side by side") :]
    assert re.findall(r"<th>(.*?)</th>", table)[:2] == ["mine, position 32", "other, position 48"]
