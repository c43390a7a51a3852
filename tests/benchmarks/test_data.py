"""the benchmark `data` on small shapes: what it measures, writes and refuses."""

import json
from pathlib import Path

import pytest

from benchmarks.data import main
from genesis.base.errors import UserError

SMALL = [
    *("--tokens", "300000", "--pairs", "1", "--seconds", "0.02", "--sparse_share", "0.0002"),
    *("--text_bytes", "300000", "--vocab_size", "700", "--memory_tokens", "60000", "--workers", "1"),
]


@pytest.mark.bench
@pytest.mark.usefixtures("forked_contenders")
def test_a_record_tells_of_every_part_and_has_a_page_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--dir", str(tmp_path), "--out", str(tmp_path / "records" / "data.json")]) == 0
    record = json.loads((tmp_path / "records" / "data.json").read_text())
    page = (tmp_path / "records" / "data.md").read_text()
    assert str(tmp_path) not in json.dumps(record)
    assert page == capsys.readouterr().out
    for shape in record["prepared"]["seq_len"].values():
        reader = shape["readers"]["genesis"]
        assert reader["tokens_per_second"] > 0
        assert reader["speed_of_genesis"]["median"] == 1.0
    assert [one["num_shards"] for one in record["opening"]["openings"]] == [20, 2]
    assert record["streaming"]["speed_over_encode"]["median"] > 0.0
    assert len(record["streaming"]["memory"]["resident_bytes"]) == 10
    assert page.count("## ") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "prepared,steaming"], "--parts has 'steaming'; there are prepared, opening, streaming"),
        (["--peers", "litdata"], "--peers has 'litdata', and there is no such file: give litdata=PYTHON"),
        (["--peers", "webdataset=x"], "--peers has 'webdataset'; there are litdata, mosaicml_streaming"),
        (["--pairs", "0"], "--pairs is 0: it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(arguments)
