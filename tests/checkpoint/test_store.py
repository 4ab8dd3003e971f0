import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint import digests
from plait.checkpoint import store as store_module
from plait.checkpoint.store import CheckpointStore
from plait.errors import RunError
from plait.models.files import tensor_file
from plait.models.files.tensor_file import FileDigest
from tests.cases import examples
from tests.forked import exit_code_of, forked


@pytest.fixture(autouse=True)
def one_thread():
    """A forked process has none of OpenMP's threads, and would wait for them in the first parallel loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors_of(step: int, numel: int = 1000) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    master = torch.randn(numel, generator=generator)
    return {"master": master, "moment.first": master.double() * 2, "step": torch.tensor(step)}


def state_of(step: int) -> dict:
    return {"step": step, "best": -math.inf if step == 1 else step / 7, "offsets": {"metrics.jsonl": 10 * step}}


def save(
    store: CheckpointStore, step: int, *, numel: int = 1000, write_parts: store_module.WriteParts | None = None
) -> Path:
    return store.save(step, tensors_of(step, numel), state_of(step), write_parts)


def check_is_whole(store: CheckpointStore, step: int, numel: int = 1000) -> None:
    found = store.at(step)
    assert found.state == state_of(step)
    loaded, expected = found.tensors(), tensors_of(step, numel)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_everything_comes_back_exactly(tmp_path: Path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    assert store.latest() is None
    values = torch.tensor([0.1, -0.0, math.nan, math.inf, 1e-45])
    tensors = {
        "f64": values.double(),
        "f32": values,
        "bf16": values.bfloat16(),
        "f16": values.half(),
        "i64": torch.tensor([2**62, -1]),
        "u8": torch.get_rng_state(),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "not contiguous": torch.arange(6.0).reshape(2, 3).T,
        "with gradient": torch.ones(2, requires_grad=True),
    }
    state = {"seed": 2**70, "x": [0.1, math.nan, -math.inf], "none": None, "nested": {"a": (1, "ü")}, "flag": True}
    folder = store.save(7, tensors, state)
    found = store.latest()
    assert found is not None
    assert (found.step, found.folder) == (7, folder)
    loaded = found.tensors()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        same = loaded[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(same, tensor.detach().contiguous().reshape(-1).view(torch.uint8)), name
    assert math.isnan(found.state["x"].pop(1))
    assert found.state == {"seed": 2**70, "x": [0.1, -math.inf], "none": None, "nested": {"a": [1, "ü"]}, "flag": True}


@settings(max_examples=examples(6, 15), deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists),
        max_size=4,
    )
)
def test_any_plain_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict):
    store = CheckpointStore(tmp_path_factory.mktemp("state"), keep_last=1)
    store.save(1, {}, state)
    assert store.at(1).state == state


@pytest.mark.parametrize(
    ("state", "message"),
    [({"a": {1: 2}}, "state.a has the key 1"), ({"a": [torch.ones(1)]}, r"state.a\[0\] is a Tensor")],
)
def test_a_state_that_would_come_back_changed_is_our_own_fault(tmp_path: Path, state: dict, message: str):
    with pytest.raises(AssertionError, match=message):
        CheckpointStore(tmp_path, keep_last=1).save(1, {}, state)


def test_loaded_tensors_are_private(tmp_path: Path):
    """Writing to a loaded tensor must not reach the file that it maps."""
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    store.at(1).tensors()["master"].fill_(0)
    check_is_whole(store, 1)


def test_the_last_ones_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2)
    kept = []
    for step in (1, 2, 3, 5, 8):
        save(store, step)
        kept.append(store.steps())
    assert kept == [[1], [1, 2], [2, 3], [3, 5], [5, 8]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-8"]
    for step in (5, 8):
        check_is_whole(store, step)


def damage_tensor_byte(folder: Path) -> None:
    content = bytearray((folder / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "tensors.safetensors").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn tensors": lambda folder: os.truncate(folder / "tensors.safetensors", 500),
    "one bit of a tensor": damage_tensor_byte,
    "no tensors": lambda folder: (folder / "tensors.safetensors").unlink(),
    "torn state": lambda folder: os.truncate(folder / "state.json", 20),
    "other state": lambda folder: (folder / "state.json").write_text('{"step": 1}'),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "torn manifest": lambda folder: os.truncate(folder / "manifest.json", 30),
    "empty manifest": lambda folder: os.truncate(folder / "manifest.json", 0),
    "strange manifest": lambda folder: (folder / "manifest.json").write_text('{"format": 1, "step": 3}'),
    "manifest of another step": lambda folder: (folder / "manifest.json").write_text(
        (folder.parent / "step-2" / "manifest.json").read_text()
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_checkpoints_are_passed_over(tmp_path: Path, damage: Callable[[Path], object]):
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(store, step)
    damage(tmp_path / "step-3")
    latest = store.latest()
    assert latest is not None
    assert latest.step == 2
    with pytest.raises(RunError, match=r"step-3 is damaged; whole checkpoints: step 1, step 2"):
        store.at(3)
    with pytest.raises(RunError, match="step-9 is not there"):
        store.at(9)
    save(store, 3)
    check_is_whole(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_from_nothing(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2)
    (tmp_path / "step-1.tmp").mkdir()
    assert store.latest() is None, "nothing was ever finished"
    for step in (1, 2):
        save(store, step)
        damage_tensor_byte(tmp_path / f"step-{step}")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole: step 1, 2 damaged.*`overwrite: true`"):
        store.latest()


def test_later_checkpoints_can_be_discarded(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=4)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.discard_after(2)
    assert store.steps() == [1, 2]


def test_a_full_disk_is_said_and_the_last_checkpoint_stays_good(tmp_path: Path):
    """A limit on the size of files stands for the full disk: the kernel cuts the write and then refuses it."""
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 4)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        message = (
            r"checkpoint of step 5 cannot be written to .*: File too large: here a file may have 100,000 bytes; raise "
            r"that limit \(`ulimit -f`\); it needs 3\.1 MiB; the last good one is step 4.*--resume.*keep_last"
        )
        with pytest.raises(RunError, match=message):
            save(store, 5, numel=100_000, write_parts=lambda _: ({"of-ranks": FileDigest(2 << 20, 0)}, {}))

    assert exit_code_of(forked(work)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4"]
    check_is_whole(store, 4)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_no_space_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    real_open = open
    monkeypatch.setattr(
        digests, "open", lambda path, mode: real_open("/dev/full" if mode == "wb" else path, mode), raising=False
    )
    with pytest.raises(RunError, match=r"No space left on device.*there is no earlier one"):
        save(store, 1)
    assert list(tmp_path.iterdir()) == []


def lines_of_save(work: Callable[[], None], kill_at: int | None) -> int:
    """Run `work` and count the lines that it executes in the modules of the store; SIGKILL at line `kill_at`."""
    files = {store_module.__file__, digests.__file__, tensor_file.__file__}
    count = 0

    def on_line(frame, event, _):
        nonlocal count
        if event == "line":
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    sys.settrace(lambda frame, *_: on_line if frame.f_code.co_filename in files else None)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def test_a_kill_at_any_line_of_a_save_leaves_a_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines drawn from all that a save executes: writing, renaming, pruning. Chunks are small, so files are torn."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1000)
    prepared = tmp_path / "prepared"
    for step in (1, 2, 3):
        save(CheckpointStore(prepared, keep_last=2), step)

    def fresh(name: str) -> CheckpointStore:
        return CheckpointStore(shutil.copytree(prepared, tmp_path / name), keep_last=2)

    counted = fresh("count")
    num_lines = lines_of_save(lambda: save(counted, 4), None)
    assert num_lines > 100
    draw = random.Random(0)
    found_steps = set()
    for kill_at in [num_lines - 1, *draw.sample(range(1, num_lines - 1), examples(9, 19))]:
        store = fresh(f"line-{kill_at}")
        child = forked(lambda kill_at=kill_at, store=store: lines_of_save(lambda: save(store, 4), kill_at))
        assert exit_code_of(child) == -signal.SIGKILL, "the child was to die inside the save"
        latest = store.latest()
        assert latest is not None
        assert latest.step in (3, 4)
        found_steps.add(latest.step)
        check_is_whole(store, latest.step)
        for step in (4, 5):
            save(store, step)
        check_is_whole(store, 5)
        left = sorted(path.name for path in store.folder.iterdir())
        assert left == ["step-4", "step-5"], "what the killed process left is gone"
    assert found_steps == {3, 4}, "some kills came before the rename and some after it"


@pytest.mark.parametrize(("kill_before", "found"), [(1, "step-3"), (2, "step-3.replaced"), (3, "step-3")])
def test_a_kill_while_the_only_checkpoint_is_saved_again_leaves_it(tmp_path: Path, kill_before: int, found: str):
    """The old one counts until the new one stands: before, between and after the two renames (3: of the next save)."""
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 3)

    def work() -> None:
        renames = []
        rename = os.rename

        def counting(*paths: Path) -> None:
            renames.append(paths)
            if len(renames) == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*paths)

        store_module.os.rename = counting
        save(store, 3)
        save(store, 3)

    assert exit_code_of(forked(work)) == -signal.SIGKILL
    latest = store.latest()
    assert latest is not None
    assert latest.folder.name == found
    check_is_whole(store, 3)
    assert store.steps() == [3]
    save(store, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    save(store, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_kill_from_outside_leaves_a_good_checkpoint(tmp_path: Path):
    """Torn in the middle of system calls too: a process that saves without end is killed at a random time."""
    numel = 300_000
    draw = random.Random(1)
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1, numel=numel)
    batches = [(tensors_of(step, numel), state_of(step)) for step in range(2, 40)]
    newest = 1
    for _ in range(6):

        def work(first: int = newest + 1) -> None:
            for tensors, state in batches[first - 2 :]:
                store.save(state["step"], tensors, state)
            time.sleep(30)

        child = forked(work)
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        latest = store.latest()
        assert latest is not None
        assert latest.step >= newest
        newest = latest.step
        check_is_whole(store, newest, numel)


def test_saving_takes_no_second_copy(tmp_path: Path):
    """Peak memory of a save grows by far less than the tensors that it writes."""

    def work() -> None:
        tensors = {f"t{index}": torch.ones(8 << 20) for index in range(4)}  # 4 x 32 MiB
        store = CheckpointStore(tmp_path, keep_last=1)
        store.save(1, {"small": torch.ones(8)}, {})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        store.save(2, tensors, {})
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 24 << 10, f"the peak grew by {grown_kib} KiB"

    assert exit_code_of(forked(work)) == 0


def test_the_tensors_open_with_the_safetensors_package(tmp_path: Path):
    folder = save(CheckpointStore(tmp_path, keep_last=1), 3)
    assert torch.equal(load_file(folder / "tensors.safetensors")["master"], tensors_of(3)["master"])
    assert json.loads((folder / "manifest.json").read_text())["step"] == 3
