import json
from pathlib import Path

import pytest

from benchmarks.versions import BEFORE, NOW, format_record, main
from genesis.base.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.bench
@pytest.mark.process
@pytest.mark.usefixtures("forked_contenders")
def test_two_checkouts_take_turns_and_the_record_has_their_ratios_without_paths(tmp_path: Path) -> None:
    out = tmp_path / "versions.json"
    arguments = ["--before", str(ROOT), "--model", "tiny", "--saved_model", "tiny", "--pairs", "2", "--windows", "2"]
    arguments += ["--tokens", "100000", "--seconds", "0.1", "--threads", "1", "--out", str(out)]

    assert main(arguments) == 0

    record = json.loads(out.read_text(encoding="utf-8"))
    assert {key.split(",")[0] for key in record["results"]} == {"step", "data", "checkpoint", "generate"}
    for result in record["results"].values():
        assert result["ratio"]["num_pairs"] == 2
        assert result["median_seconds"].keys() == {NOW, BEFORE}
        assert min(result["median_seconds"].values()) > 0
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert page == format_record(record)
    assert str(ROOT) not in page


def test_a_directory_without_genesis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--before is .*, which is not a checkout of Genesis"):
        main(["--before", str(tmp_path)])
