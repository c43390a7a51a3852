"""What can be asked for, as checkpoints come and go."""

import shutil

import pytest

from genesis.base.errors import UserError
from genesis.serve.catalogue import Catalogue, read_losses
from genesis.serve.errors import ApiError
from tests.tiny_runs import build_decoder, save

LOG = """step,train/loss,validation/loss
1,5.5,
2,5.0,4.75
3,nan,
4,4.5
"""


def ids(catalogue):
    return [entry.id for entry in catalogue.entries()]


def test_a_runs_checkpoints_come_oldest_first_with_their_clocks_and_losses(own_run):
    (own_run / "metrics.csv").write_text(LOG)
    entries = Catalogue([own_run]).entries()
    assert [entry.id for entry in entries] == ["step-00000001", "step-00000002", "step-00000003"]
    assert [(entry.step, entry.tokens_seen) for entry in entries] == [(1, 100), (2, 200), (3, 300)]
    assert [(entry.train_loss, entry.validation_loss) for entry in entries] == [(5.5, None), (5.0, 4.75), (None, None)]


def test_a_new_checkpoint_appears_and_a_pruned_one_vanishes(own_run):
    catalogue = Catalogue([own_run])
    assert catalogue.find("latest").step == 3
    save(own_run / "checkpoints", 4, build_decoder(4), {})
    assert catalogue.find("latest").step == 4
    shutil.rmtree(own_run / "checkpoints/step-00000004")
    assert catalogue.find("latest").step == 3
    with pytest.raises(ApiError, match="no such model: 'step-00000004'; did you mean step-0000000") as error:
        catalogue.find("step-00000004")
    assert (error.value.status, error.value.param) == (404, "model")


def test_a_checkpoint_written_anew_under_its_name_is_another_version(own_run):
    catalogue = Catalogue([own_run])
    before = catalogue.find("step-00000003")
    shutil.rmtree(own_run / "checkpoints/step-00000003")
    save(own_run / "checkpoints", 3, build_decoder(9), {})
    after = catalogue.find("step-00000003")
    assert (before.id, before.path) == (after.id, after.path)
    assert before.version != after.version


def test_the_log_of_a_live_run_is_read_as_it_grows(own_run):
    log = own_run / "metrics.csv"
    catalogue = Catalogue([own_run])
    assert catalogue.find("latest").validation_loss is None
    log.write_text("step,validation/loss\n3,4.")
    assert catalogue.find("latest").validation_loss == 4.0
    log.write_text("step,validation/loss\n3,4.25\n")
    assert catalogue.find("latest").validation_loss == 4.25


def test_a_save_in_flight_and_a_foreign_directory_are_not_listed(own_run):
    for name in ("step-00000009.staging-1", "quarantined-step-00000008", "step-00000007"):
        (own_run / "checkpoints" / name).mkdir()
    assert len(ids(Catalogue([own_run]))) == 3


def test_several_runs_are_told_apart_by_the_shortest_ends_of_their_paths(own_run, run, exported):
    other = shutil.copytree(run, own_run.parent / "other" / "run")
    catalogue = Catalogue([own_run, other, exported])
    assert ids(catalogue)[:4] == [f"{own_run.parent.name}/run/step-{step:08d}" for step in (1, 2, 3)] + [
        "other/run/step-00000001"
    ]
    assert catalogue.find("other/run/latest").path == other / "checkpoints/step-00000003"
    assert catalogue.find(f"{exported.parent.name}/model").path == exported
    assert "latest" not in catalogue.by_id()


def test_a_single_checkpoint_a_directory_of_them_and_an_export_are_each_served(own_run, exported):
    single = Catalogue([own_run / "checkpoints/step-00000002"])
    assert list(single.by_id()) == ["step-00000002", "latest"]
    assert ids(Catalogue([own_run / "checkpoints"])) == ids(Catalogue([own_run]))
    (entry,) = Catalogue([exported]).entries()
    assert (entry.id, entry.step) == ("model", None)
    shutil.rmtree(own_run / "checkpoints/step-00000002")
    assert single.entries() == []


def test_a_run_that_has_no_checkpoint_yet_is_waited_for(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    catalogue = Catalogue([tmp_path])
    with pytest.raises(ApiError, match="no checkpoint is committed yet"):
        catalogue.find("latest")
    save(tmp_path / "checkpoints", 1, build_decoder(1), {})
    assert catalogue.find("latest").step == 1


def test_what_is_no_run_is_refused(own_run, tmp_path):
    with pytest.raises(UserError, match=r"no such directory: .*nowhere"):
        Catalogue([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is not a run"):
        Catalogue([tmp_path / "empty"])
    with pytest.raises(UserError, match="is given twice"):
        Catalogue([own_run, own_run / "checkpoints"])


def test_a_log_without_a_header_or_rows_has_no_losses(tmp_path):
    assert read_losses(tmp_path / "none.csv", [1]) == {}
    (tmp_path / "log.csv").write_text("")
    assert read_losses(tmp_path / "log.csv", [1]) == {}
    (tmp_path / "log.csv").write_text("step,train/loss\n1")
    assert read_losses(tmp_path / "log.csv", [1]) == {1: {}}
