"""A rank's windows of a stream: exactly once, the same on any number of ranks, and resumed at every step."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genesis.base.errors import UserError
from genesis.data.stream.state import combine_states, count_spans, measure_usage, read_states
from genesis.data.window import IGNORE_INDEX
from tests.data.stream.streams import (
    FORMATS,
    GLOBAL_BATCH,
    PACKINGS,
    SEQ_LEN,
    count_pairs,
    equal_windows,
    expected_pairs,
    make_stream,
    make_texts,
    make_windows,
    read_to_the_end,
    read_windows,
    rows_of,
    write_files,
)

WEIGHTS = {"web": 2, "code": 1}
TEXTS = {"web": make_texts(50, seed=1), "code": make_texts(30, seed=2)}
NUM_WINDOWS = 12


def write_sources(directory, suffix=".jsonl", num_files=4):
    return {name: write_files(directory / name, texts, suffix, num_files) for name, texts in TEXTS.items()}


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_run_stopped_after_any_window_goes_on_with_the_same_stream(tmp_path, tokenizer, packing, suffix):
    stream = make_stream(write_sources(tmp_path, suffix), tokenizer, packing)
    straight = read_windows(make_windows(stream, WEIGHTS), 0, NUM_WINDOWS)
    stopped = make_windows(stream, WEIGHTS)
    for number in range(1, NUM_WINDOWS):
        read_windows(stopped, 0, number) if number == 1 else stopped.window((number - 1) * GLOBAL_BATCH)
        resumed = make_windows(stream, WEIGHTS)
        resumed.load_state(through_json(stopped.state(number * GLOBAL_BATCH)), number * GLOBAL_BATCH)
        assert equal_windows(resumed.window(number * GLOBAL_BATCH), straight[number]), f"after window {number}"
    rest = read_windows(resumed, NUM_WINDOWS, 4)
    assert all(map(equal_windows, rest, read_windows(stopped, NUM_WINDOWS - 1, 5)[1:]))


_RESUME = """
import json, sys
from pathlib import Path
from tests.data.stream.streams import make_stream, make_windows, read_windows, rows_of

directory, tokenizer, packing, suffix = (Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
saved = json.loads(sys.stdin.read())
stream = make_stream({name: directory / name for name in ("web", "code")}, tokenizer, packing, num_workers=1)
windows = make_windows(stream, {"web": 2, "code": 1})
windows.load_state(saved["state"], saved["position"])
print(json.dumps([rows_of(window) for window in read_windows(windows, saved["position"] // 8, 5)]))
windows.close()
"""


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_same_stream(tmp_path, tokenizer):
    stream = make_stream(write_sources(tmp_path, ".jsonl.zst"), tokenizer, "best_fit")
    windows = make_windows(stream, WEIGHTS)
    straight = read_windows(windows, 0, 12)
    saved = {"state": windows.state(7 * GLOBAL_BATCH), "position": 7 * GLOBAL_BATCH}
    outcome = subprocess.run(
        [sys.executable, "-c", _RESUME, str(tmp_path), str(tokenizer), "best_fit", ".jsonl.zst"],
        input=json.dumps(saved),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert json.loads(outcome.stdout) == through_json([rows_of(window) for window in straight[7:]])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_token_of_one_epoch_is_seen_once(tmp_path, tokenizer, packing, suffix):
    stream = make_stream(write_sources(tmp_path, suffix), tokenizer, packing, max_epochs=1)
    windows = make_windows(stream, WEIGHTS)
    rows, position = read_to_the_end(windows)
    assert count_pairs(rows) == expected_pairs(stream.tokenizer, TEXTS["web"] + TEXTS["code"])
    usage = windows.usage(position)
    for name, texts in TEXTS.items():
        assert (usage[name].num_documents, usage[name].num_spans) == (len(texts), count_spans(stream)[name])
    labels = sum(label != IGNORE_INDEX for _, row, _ in rows for label in row)
    in_documents = sum(entry.num_tokens for entry in usage.values())
    # The label after a document's end, where the next one begins in the same row, is consumed and does not count.
    assert labels <= in_documents <= labels + sum(entry.num_documents for entry in usage.values())


@pytest.mark.parametrize("packing", PACKINGS)
def test_two_then_four_then_one_rank_have_the_same_global_batches_and_lanes(tmp_path, tokenizer, packing):
    stream = make_stream(write_sources(tmp_path), tokenizer, packing, num_lanes=4)
    alone = make_windows(stream, WEIGHTS)
    straight = read_windows(alone, 0, 12)
    position, states = 0, None
    for world_size in (2, 4, 1):
        ranks = [make_windows(stream, WEIGHTS, rank, world_size, micro_batch_size=1) for rank in range(world_size)]
        if states is not None:
            for rank in ranks:
                rank.load_state(through_json(combine_states(states)), position)
        for _ in range(4):
            parts = [rank.window(position) for rank in ranks]
            whole = straight[position // GLOBAL_BATCH]
            assert len({len(rows_of(part)) for part in parts}) == 1
            assert sorted(row for part in parts for row in rows_of(part)) == sorted(rows_of(whole))
            assert sum(part.num_valid_tokens for part in parts) == whole.num_valid_tokens
            assert sum(part.num_bytes for part in parts) == whole.num_bytes
            position += GLOBAL_BATCH
        states = [rank.state(position) for rank in ranks]
        assert through_json(combine_states(states)) == through_json(alone.state(position))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 120), min_size=4, max_size=20),
    world_sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    packing=st.sampled_from(PACKINGS),
    max_epochs=st.sampled_from([None, 1, 2]),
    block_tokens=st.integers(SEQ_LEN + 1, 90),
)
def test_the_stream_does_not_depend_on_the_ranks_that_read_it(
    tmp_path_factory, tokenizer, sizes, world_sizes, packing, max_epochs, block_tokens
):
    directory = tmp_path_factory.mktemp("ranks")
    texts = [f"{number} " + "x" * size for number, size in enumerate(sizes)]
    stream = make_stream(
        {
            "web": write_files(directory / "web", texts, ".jsonl"),
            "code": write_files(directory / "code", texts, ".txt"),
        },
        *(tokenizer, packing),
        **{"num_lanes": 4, "block_tokens": block_tokens, "max_epochs": max_epochs},
    )
    alone, position, states = make_windows(stream, WEIGHTS), 0, None
    for world_size in world_sizes:
        ranks = [make_windows(stream, WEIGHTS, rank, world_size, micro_batch_size=1) for rank in range(world_size)]
        for rank in ranks if states is not None else ():
            rank.load_state(combine_states(states), position)
        for _ in range(2):
            rows = sorted(row for rank in ranks for row in rows_of(rank.window(position)))
            assert rows == sorted(rows_of(alone.window(position)))
            position += GLOBAL_BATCH
        states = [rank.state(position) for rank in ranks]
    assert read_states(stream, combine_states(states)) == read_states(stream, alone.state(position))


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_consumed_share_of_each_source_is_exact_to_one_sequence_at_any_point(tmp_path, tokenizer, packing):
    windows = make_windows(make_stream(write_sources(tmp_path), tokenizer, packing), {"web": 5, "code": 2})
    for number in range(1, 30):
        windows.window((number - 1) * GLOBAL_BATCH)
        usage = windows.usage(number * GLOBAL_BATCH)
        assert abs(usage["code"].num_sequences - number * GLOBAL_BATCH * 2 / 7) < 1
        assert usage["web"].num_sequences + usage["code"].num_sequences == number * GLOBAL_BATCH


def test_a_source_at_its_limit_of_epochs_is_replaced_and_the_others_go_on(tmp_path, tokenizer):
    stream = make_stream(write_sources(tmp_path), tokenizer, max_epochs={"code": 1})
    windows = make_windows(stream, {"web": 1, "code": 3})
    rows = [row for window in read_windows(windows, 0, 60) for row in rows_of(window)]
    usage = windows.usage(60 * GLOBAL_BATCH)
    assert usage["code"].num_documents == len(TEXTS["code"])
    assert usage["web"].num_spans > 2 * count_spans(stream)["web"]
    assert usage["web"].num_sequences + usage["code"].num_sequences == 60 * GLOBAL_BATCH
    counted = count_pairs(rows)
    assert all(counted[pair] >= count for pair, count in expected_pairs(stream.tokenizer, TEXTS["code"]).items())


def test_windows_that_were_read_ahead_are_given_again(tmp_path, tokenizer):
    windows = make_windows(make_stream(write_sources(tmp_path), tokenizer, num_workers=2), WEIGHTS)
    straight = read_windows(windows, 0, 9)
    windows.release(4 * GLOBAL_BATCH)
    assert all(map(equal_windows, read_windows(windows, 4, 5), straight[4:]))
    assert equal_windows(windows.window(6 * GLOBAL_BATCH), straight[6])
    windows.close()
    with pytest.raises(RuntimeError, match="are closed"):
        windows.window(7 * GLOBAL_BATCH)
    windows.open()
    assert equal_windows(windows.window(5 * GLOBAL_BATCH), straight[5])
    with pytest.raises(AssertionError, match="it was released"):
        windows.window(3 * GLOBAL_BATCH)
    windows.close()


def test_a_window_of_whole_documents_says_so_in_its_ids_and_labels(tmp_path, tokenizer):
    stream = make_stream(write_sources(tmp_path), tokenizer, "best_fit")
    for inputs, labels, documents in rows_of(make_windows(stream, WEIGHTS).window(0)):
        for at, label in enumerate(labels):
            if label != IGNORE_INDEX and at + 1 < SEQ_LEN:
                assert (inputs[at + 1], documents[at + 1]) == (label, documents[at])
            elif at + 1 < SEQ_LEN and inputs[at] == stream.tokenizer.eos_id and inputs[at + 1] == 2:
                assert documents[at + 1] == documents[at] + 1


# ---- state


def test_the_state_is_plain_small_and_holds_no_token(tmp_path, tokenizer):
    windows = make_windows(make_stream(write_sources(tmp_path), tokenizer), WEIGHTS)
    read_windows(windows, 0, 20)
    state = windows.state(20 * GLOBAL_BATCH)
    assert through_json(state) == state
    assert len(json.dumps(state["lanes"])) < 4 * 2 * 250
    assert set(state["lanes"]["0"]["web"]) == {
        *("cursor", "num_given", "num_sequences", "num_tokens", "num_documents", "num_bad_documents"),
        *("num_damaged_spans", "num_blank_documents"),
    }
    usage = measure_usage(windows.stream, read_states(windows.stream, state))
    assert usage == windows.usage(20 * GLOBAL_BATCH)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed 3, but this run has 4; set data.seed"),
        ({"num_lanes": 2}, "num_lanes 4, but this run has 2; set data.stream.num_lanes"),
        ({"block_tokens": 101}, "block_tokens 100, but this run has 101"),
        ({"packing": "pad"}, "packing chunk, but this run has pad; set data.packing"),
        ({"max_epochs": 2}, "max_epochs web: None, but this run has web: 2"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, tokenizer, changes, words):
    directories = write_sources(tmp_path)
    state = make_windows(make_stream(directories, tokenizer)).state(0)
    packing = changes.pop("packing", "chunk")
    other = make_windows(make_stream(directories, tokenizer, packing, changes.pop("seed", 3), **changes))
    with pytest.raises(UserError) as error:
        other.load_state(state, 0)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_state_of_other_files_another_version_or_too_few_ranks_is_refused(tmp_path, tokenizer):
    directories = write_sources(tmp_path)
    windows = make_windows(make_stream(directories, tokenizer))
    state = windows.state(0)
    with pytest.raises(UserError, match="has version 0, this genesis reads up to 2"):
        windows.load_state({**state, "version": 0}, 0)
    with pytest.raises(UserError, match="lacks lanes 1, 3 of its stream"):
        windows.load_state(make_windows(windows.stream, rank=0, world_size=2).state(0), 0)
    with pytest.raises(UserError, match=r"files web: .*; stream the same files"):
        make_windows(make_stream({**directories, "web": directories["code"]}, tokenizer)).load_state(state, 0)
    moved = directories["web"].rename(tmp_path / "moved")
    make_windows(make_stream({**directories, "web": moved}, tokenizer)).load_state(state, 0)
    with (moved / "0.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"files web: [0-9a-f]{16}, .*; stream the same files"):
        make_windows(make_stream({**directories, "web": moved}, tokenizer)).load_state(state, 0)


def test_a_block_smaller_than_a_sequence_and_a_wrong_world_size_are_refused(tmp_path, tokenizer):
    directories = write_sources(tmp_path)
    with pytest.raises(UserError, match=r"block_tokens is 16, less than a sequence of data\.seq_len 16"):
        make_stream(directories, tokenizer, block_tokens=16)
    stream = make_stream(directories, tokenizer)
    with pytest.raises(UserError, match="are not divisible by 3 ranks; use one of these world sizes: 1, 2, 4"):
        make_windows(stream, world_size=3)


def test_options_that_cannot_be_are_refused(tmp_path, tokenizer):
    directories = write_sources(tmp_path)
    options = make_stream(directories, tokenizer).options
    for changes, words in (
        ({"num_workers": -1}, "data.stream.num_workers is -1; it must be at least 0"),
        ({"block_tokens": 0}, "data.stream.block_tokens is 0"),
        ({"sources": ()}, "no sources are given"),
    ):
        with pytest.raises(UserError, match=words.replace(".", r"\.")):
            replace(options, **changes)
    for limits, words in (({"web": 0}, "'web' 0 epochs"), ({"wbe": 1}, "'wbe', which is not among web, code")):
        with pytest.raises(UserError, match=words):
            make_stream(directories, tokenizer, max_epochs=limits)


def test_lanes_of_one_round_are_not_of_one_source(tmp_path, tokenizer):
    """The mix goes through all lanes: over many rounds every lane draws both sources."""
    stream = make_stream(write_sources(tmp_path), tokenizer, num_lanes=4)
    windows = make_windows(stream, {"web": 1, "code": 1})
    read_windows(windows, 0, 40)
    consumed = Counter()
    for lane, parts in windows.state(40 * GLOBAL_BATCH)["lanes"].items():
        consumed.update({(lane, name): part["num_sequences"] for name, part in parts.items()})
    assert min(consumed.values()) > 20
