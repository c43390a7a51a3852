"""What a checkpoint says of the data that were consumed."""

from genesis.data.usage import DATA_STATE, DataUsage, read_data_usage
from genesis.train.data_module import CorpusDataModule


def test_the_state_is_looked_for_under_the_data_modules_name() -> None:
    assert CorpusDataModule.__qualname__ == DATA_STATE


def test_a_prepared_corpus_says_it_once_for_all_ranks() -> None:
    state = {"tokens_consumed": {"web": 640, "code": 320}, "epochs_consumed": {"web": 0.5, "code": 2.0}}
    sections = [{"trainer": {DATA_STATE: state}}] * 2
    assert read_data_usage(sections) == {"web": DataUsage(640, 0.5), "code": DataUsage(320, 2.0)}


def test_checkpoints_from_before_epochs_were_counted_have_tokens() -> None:
    assert read_data_usage([{"trainer": {DATA_STATE: {"tokens_consumed": {"web": 64}}}}]) == {"web": DataUsage(64)}


def test_the_lanes_of_a_streams_ranks_add_up() -> None:
    def section(num_tokens: int, num_bad: int) -> dict[str, object]:
        entry = {"num_tokens": num_tokens, "num_documents": 3, "num_bad_documents": num_bad}
        return {"trainer": {DATA_STATE: {"usage_of_lanes": {"web": entry}}}}

    assert read_data_usage([section(100, 0), section(50, 1)]) == {"web": DataUsage(150, None, 6, 1)}


def test_a_run_with_other_data_says_nothing() -> None:
    assert read_data_usage([{"trainer": {"SomebodysData": {"position": 3}}}, {}]) == {}
