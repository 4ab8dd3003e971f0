"""What one layout saves, every other loads; files are whole or absent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import DataError, LayoutError, RunError
from plait.launch.group import Group
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import Holdings, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.stores import stored_once
from plait.reallocation.memory import allocate
from plait.reallocation.mover import moving
from plait.reallocation.saving import SavedFiles, loading, saving
from plait.reallocation.stores import store_files
from plait.schedule.work import to_the_end
from tests.reallocation.test_mover import all_ranks
from tests.reallocation.worker import SMALL, cut, held_part, values_of

ONE = Cluster(1, 1)
ALONE = Layout.on((0,))


def test_saved_under_tp_loaded_under_stages_and_on_one_rank(two: Group, four: Group, tmp_path: Path) -> None:
    written = all_ranks(two, "save", tmp_path, Layout.on(range(2), tp=2), "bfloat16")
    sizes = [sum(records) for records in written]
    assert sum(sizes) == SMALL.num_elements * (2 + 4), "an element was written twice, or never"
    assert all(all(records) for records in written), "each rank writes its own file"
    names = [f"{name}{end}" for name in ("masters", "weights") for end in ("-00000", "-00001", ".layout")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.json" if name.endswith("layout") else f"{name}.safetensors" for name in names
    )
    for group, layout in (
        (two, Layout.on(range(2), pp=2)),
        (two, Layout.on((1,))),
        (two, Layout.on(range(2), tp=2)),
        (four, Layout.on(range(4), dp=2, pp=2)),
        (four, Layout.on((3, 0, 1), dp=3)),
    ):
        assert all_ranks(group, "load", tmp_path, layout, "bfloat16", "bfloat16") == [[0, 0]] * group.num_ranks
    assert all_ranks(two, "load", tmp_path, Layout.on(range(2), dp=2), "float32", "bfloat16") == [[0, 0]] * 2


def test_saved_by_four_loaded_without_any_group(four: Group, tmp_path: Path) -> None:
    all_ranks(four, "save", tmp_path, Layout.on(range(4), dp=2, tp=2), "float32")
    held = weights(SMALL, ALONE, "float32")
    buffers = allocate(held, 0)
    run(loading(held, ONE, 0, buffers, SavedFiles(tmp_path, "weights")))
    for one in held.ranks[0]:
        assert torch.equal(held_part(buffers, one), cut(values_of(held, "float32")[one.param], one))


def run(steps) -> None:
    for _ in steps:
        pass


def filled(held: Holdings) -> dict[str, torch.Tensor]:
    buffers = allocate(held, 0)
    for one in held.ranks[0]:
        held_part(buffers, one).copy_(cut(values_of(held, held.dtype)[one.param], one))
    return buffers


def saved(folder: Path) -> Holdings:
    held = weights(SMALL, ALONE, "float32")
    run(saving(held, ONE, 0, filled(held), SavedFiles(folder, "actor")))
    return held


def test_a_file_is_plain_safetensors_with_zeros_between_the_blocks(tmp_path: Path) -> None:
    held = saved(tmp_path)
    (flat,) = load_file(tmp_path / "actor-00000.safetensors").values()
    assert torch.equal(flat, filled(held)["weights"])
    assert flat.numel() > SMALL.num_elements


def test_a_strided_part_of_a_file(tmp_path: Path) -> None:
    """A rank of tp 2 reads half the columns of each row of the down projections, and writes into such a file."""
    held = saved(tmp_path)
    half = weights(SMALL, Layout.on((0, 1), tp=2), "float32")
    cluster = Cluster(1, 2)
    source = Holdings(held.params, "float32", {2: held.ranks[0]}, {2: held.buffers[0]})
    mine = Holdings(half.params, "float32", {0: half.ranks[0]}, {0: half.buffers[0]})
    flat = Holdings(
        held.params,
        "float32",
        {2: tuple(one._replace(buffer="file") for one in held.ranks[0])},
        {2: {"file": held.buffers[0]["weights"]}},
    )
    buffers = allocate(mine, 0)
    files = store_files(flat, cluster, tmp_path, "actor")
    to_the_end(moving(plan_move(flat, mine, cluster), 0, buffers, files=files))
    values = values_of(held, "float32")
    assert all(torch.equal(held_part(buffers, one), cut(values[one.param], one)) for one in mine.ranks[0])

    # Back: each box of the file is what rank 0 has of it; the rest stays zero.
    places = {one.param: one for one in source.ranks[2]}
    boxes = tuple(
        places[one.param]._replace(box=one.box, offset=places[one.param].first(one.box), buffer="file")
        for one in mine.ranks[0]
    )
    target = Holdings(held.params, "float32", {2: boxes}, flat.buffers)
    files = store_files(target, cluster, tmp_path, "back")
    report = to_the_end(moving(plan_move(mine, target, cluster), 0, buffers, files=files))
    assert report.sent == {2: 4 * sum(one.box.num_elements for one in mine.ranks[0])}
    found = load_file(tmp_path / "back-00000.safetensors")
    assert all(torch.equal(held_part(found, one), cut(values[one.param], one)) for one in boxes)
    assert int((found["file"] != 0).sum()) == sum(one.box.num_elements for one in boxes)


def test_a_save_that_is_given_up_leaves_no_file(tmp_path: Path) -> None:
    held = weights(SMALL, ALONE, "float32")
    files = stored_once(held, ONE)
    plan = plan_move(held, files, ONE, bucket_bytes=1024)
    steps = moving(plan, 0, filled(held), files=store_files(files, ONE, tmp_path, "actor"))
    next(steps)
    assert [path.name for path in tmp_path.iterdir()] == ["actor-00000.safetensors.tmp"]
    steps.close()
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    saved(tmp_path)
    before = (tmp_path / "actor-00000.safetensors").read_bytes()
    held = weights(SMALL, ALONE, "float32")
    steps = saving(held, ONE, 0, allocate(held, 0), SavedFiles(tmp_path, "actor"), bucket_bytes=1024)
    next(steps)
    assert (tmp_path / "actor-00000.safetensors").read_bytes() == before
    run(steps)
    assert (tmp_path / "actor-00000.safetensors").read_bytes() != before


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    held = weights(SMALL, ALONE, "float32")
    monkeypatch.setattr(os, "pwrite", full)
    size = held.buffers[0]["weights"] * 4
    with pytest.raises(RunError, match=rf"actor.save: expected to write {size} bytes to .*-00000.*No space left"):
        run(saving(held, ONE, 0, filled(held), SavedFiles(tmp_path, "actor")))
    assert not list(tmp_path.glob("*.safetensors*"))


def test_a_manifest_that_cannot_be_written_says_what_the_system_does(tmp_path: Path) -> None:
    """More room helps where there is none, and nowhere else."""
    held = weights(SMALL, ALONE, "float32")
    with pytest.raises(RunError, match=r"layout.json cannot be written: No such file or directory$"):
        run(saving(held, ONE, 0, filled(held), SavedFiles(tmp_path / "gone", "actor")))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_dtype(path: Path) -> None:
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)


def shorter(path: Path) -> None:
    save_file({name: tensor[:-1].contiguous() for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "expected a whole safetensors file, found"),
        (truncate, "expected a whole safetensors file, found"),
        (other_dtype, r"expected file as float32 \[\d+\], found torch.float64"),
        (shorter, r"expected file as float32 \[\d+\], found torch.float32"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage, message: str) -> None:
    held = saved(tmp_path)
    damage(tmp_path / "actor-00000.safetensors")
    with pytest.raises(DataError, match=re.escape(str(tmp_path)) + ".*-00000.safetensors: " + message):
        run(loading(held, ONE, 0, allocate(held, 0), SavedFiles(tmp_path, "actor")))


def test_what_is_not_there_or_of_another_model_is_refused(tmp_path: Path) -> None:
    held = saved(tmp_path)
    with pytest.raises(DataError, match=r"critic\.layout\.json: expected the layout of saved tensors"):
        run(loading(held, ONE, 0, allocate(held, 0), SavedFiles(tmp_path, "critic")))
    other = weights(
        decoder_parameters(layers=1, hidden=8, intermediate=8, heads=2, kv_heads=2, head_dim=4, vocabulary=9),
        ALONE,
        "float32",
    )
    with pytest.raises(LayoutError, match=r"expected model\.embed_tokens\.weight with"):
        run(loading(other, ONE, 0, allocate(other, 0), SavedFiles(tmp_path, "actor")))


def test_the_manifest_is_readable(tmp_path: Path) -> None:
    saved(tmp_path)
    record = json.loads((tmp_path / "actor.layout.json").read_text())
    assert (record["dtype"], len(record["stores"])) == ("float32", 1)
