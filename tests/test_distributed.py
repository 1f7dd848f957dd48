"""Several processes, as torchrun starts them: they come to what one comes to, and nothing is lost when one is killed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from locallip import cli
from locallip.norms import WarmStarts
from locallip.norms.starts import Drawn
from locallip.processes import ALONE, Processes, goes_on
from locallip.proofs.journal import chunks_of
from locallip.proofs.rows import read_rows
from locallip.proofs.shared import own_file, own_files, recovered
from locallip.training.batches import Epoch
from locallip.training.fit import Options, fit
from locallip.training.progress import Silent
from locallip.training.recipe import Recipe, WrongRecipe
from locallip.training.share import share_of

DRIVER = Path(__file__).parent / "distributed.py"
RECIPE = """
data = "embedded"
architecture = "small"
method = "local-b"
eps = "0.5"
eps_train = 0.6
epochs = 3.5
batch = 16
ramp_epochs = 2
decay_epoch = 1
augment = "crop_flip"
"""
LAST = 14  # steps: 60 images in batches of 16, three and a half times


def start(
    count: int,
    args: list[str],
    dies: str = "",
    restarts: int = 0,
    device: tuple[str, ...] = ("--device", "cpu"),
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """`locallip ARGS` in so many processes; `dies` is "STEP RANK" for one that kills itself there."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", f"--max-restarts={restarts}"]
    return subprocess.run(
        [sys.executable, *(torchrun if count > 1 else []), str(DRIVER), *args, *device],
        env={**os.environ, "DIES": dies, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distributed")
    (path / "tiny.toml").write_text(RECIPE)
    return path


def train(
    folder: Path, out: str, count: int, *more: str, dies: str = "", restarts: int = 0, code: int = 0, **driver: str
) -> str:
    args = ["train", str(folder / "tiny.toml"), "--out", str(folder / out), "--no-evaluate", *more]
    found = start(count, args, dies, restarts, **driver)
    assert found.returncode == code, found.stderr
    return found.stderr


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    train(folder, "alone", 1)
    return folder / "alone"


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    train(folder, "two", 2)
    return folder / "two"


def state(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"state-{LAST}.safetensors")


def assert_nearly_the_same(one: Path, other: Path) -> None:
    """Up to the order of sums: gradients to seven digits, vectors of power iteration, which magnify, to three."""
    ours, theirs = state(one), state(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        near = 2e-2 if name.startswith(("shared", "starts")) else 2e-3
        scale = max(float(value.double().abs().max()), 1e-12)
        assert float((value.double() - theirs[name].double()).abs().max()) <= near * scale, name
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    for mine, yours in zip(*rows, strict=True):
        for name in ("epoch", "step", "clean", "robust", "clean_loss", "worst_loss", "local_bound", "global_bound"):
            assert mine[name] == pytest.approx(yours[name], rel=1e-3), name


def test_two_processes_train_what_one_trains(alone: Path, two: Path) -> None:
    """Catches: sums for means (the moments of Adam), samples of the wrong process, vectors that begin elsewhere."""
    assert_nearly_the_same(alone, two)
    assert json.loads((two / "result.json").read_text())["about"]["processes"] == 2


def test_a_process_killed_in_the_middle_loses_nothing(folder: Path, two: Path) -> None:
    """torchrun starts all of them again, and they go on from the last checkpoint: the same bits as without the kill."""
    told = train(folder, "killed", 2, dies="11 1", restarts=1)
    assert "resumed at step 8" in told
    assert "another process of this run does not answer" in told
    for name, value in state(two).items():
        assert torch.equal(value, state(folder / "killed")[name]), name
    lines = (folder / "killed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]


def test_a_run_goes_on_with_another_number_of_processes(folder: Path, alone: Path) -> None:
    """Two begin, four go on, one ends it."""
    train(folder, "many", 2, dies="6 0", code=1)
    told = train(folder, "many", 4, "--resume", dies="6 3", code=1)
    assert "resumed at step 4" in told
    told = train(folder, "many", 1, "--resume")
    assert "resumed at step 8" in told
    assert_nearly_the_same(alone, folder / "many")


def certify(
    folder: Path, model: Path, out: str, count: int, *more: str, dies: str = "", code: int = 0, **driver: str
) -> Path:
    fixed = ["--data", "embedded", "--limit", "17", "--batch", "2", "--chunk", "1", "--seed", "5", "--eps", "0.1"]
    found = start(count, ["certify", str(model), "--out", str(folder / out), *fixed, *more], dies, **driver)
    assert found.returncode == code, found.stderr
    return folder / out


def rows_of(path: Path) -> list[dict[str, object]]:
    return [{**vars(row), "seconds": None} for row in read_rows(path)]


def test_two_processes_certify_the_same_rows(folder: Path, alone: Path) -> None:
    """Bit by bit, but for the time; one of them is killed on the way, and one process does the rest."""
    one = certify(folder, alone, "one.jsonl", 1, "--radius")
    broken = certify(folder, alone, "two.jsonl", 2, "--radius", dies="3 0", code=1)
    done = sum(len(read_rows(path)) for path in own_files(broken))
    assert done >= 2  # what was done is kept
    again = certify(folder, alone, "two.jsonl", 1, "--radius", "--resume")
    assert rows_of(one) == rows_of(again)
    assert not own_files(again)
    assert json.loads(again.with_suffix(".json").read_text())["run"]["images"] == 17 - done
    assert cli.main(["verify", str(again), "--model", str(alone), "--sample", "3", "--device", "cpu"]) == 0


def test_two_processes_end_what_they_began(folder: Path, alone: Path) -> None:
    """Rows as CSV, from a start that torchrun made again; then there is nothing left to do."""
    one = certify(folder, alone, "single.csv", 1)
    args = ["--data", "embedded", "--limit", "17", "--batch", "2", "--chunk", "1", "--seed", "5", "--eps", "0.1"]
    both = folder / "both.csv"
    found = start(2, ["certify", str(alone), "--out", str(both), *args], dies="2 1", restarts=1)
    assert found.returncode == 0, found.stderr
    assert "17 images to go" in found.stderr
    assert rows_of(one) == rows_of(both)
    assert not own_files(both)
    assert json.loads(both.with_suffix(".json").read_text())["run"]["processes"] == 2


def test_rows_of_processes_merge_after_any_interruption(folder: Path, alone: Path, tmp_path: Path) -> None:
    """Doubles, half lines, missing rows, foreign rows: whole chunks are taken over once, the rest is left to be done."""
    rows = read_rows(certify(folder, alone, "whole.jsonl", 1))
    lines = (folder / "whole.jsonl").read_text().splitlines(keepends=True)
    out, chunks, mark = tmp_path / "rows.jsonl", chunks_of(len(rows), 3), "0123456789abcdef"
    own_file(out, 0, mark).write_text("".join(lines[3:9]))
    own_file(out, 1, mark).write_text("".join(lines[6:9]) + "".join(lines[12:14]) + lines[14][:20])  # twice, and cut off
    own_file(out, 7, mark).write_text("nothing of ours\n")
    own_file(out, 2, mark).write_text("".join(lines[15:]))  # the last chunk is short

    def read(path: Path) -> list:
        return read_rows(path, whole=False)

    def faults(found: list) -> list[str]:
        return ["wrong"] if any(row.index == 7 for row in found) else []

    found = recovered(out, mark, chunks, read, faults)
    assert found == {3: rows[3:6], 15: rows[15:]}
    assert own_files(out) == [own_file(out, 0, mark)]
    assert recovered(out, mark, chunks, read, faults) == found
    assert recovered(out, mark[::-1], chunks, read, faults) == {}  # of another run
    assert recovered(tmp_path / "other.jsonl", mark, chunks, read, faults) == {}


def recipe(batch: int, seed: int = 0) -> Recipe:
    return Recipe("t", "embedded", "small", "local-b", "0.5", 0.6, 1.0, batch=batch, seed=seed, augment="crop_flip")


@settings(max_examples=60)
@given(st.integers(1, 120), st.integers(1, 8), st.integers(1, 12), st.integers(0, 10**6))
def test_every_sample_stays_with_one_process(count: int, size: int, part: int, epoch: int) -> None:
    """The processes' parts of a batch together are the batch of one process, with the same crops."""
    size = size if size * part <= count else 1
    r = recipe(size * part, epoch)
    whole = Epoch(count, r, 3, epoch)
    shares = [share_of(r.batch, count, Processes(rank, size)) for rank in range(size)]
    epochs = [Epoch(count, r, 3, epoch, share) for share in shares]
    samples = [share.samples(count) for share in shares]
    assert [len(some) for some in samples] == [share.count(count) for share in shares]
    assert sorted(torch.cat(samples).tolist()) == list(range(count))
    parts = [some[one.order].view(len(whole), -1) for some, one in zip(samples, epochs, strict=True)]
    assert torch.equal(torch.cat(parts, 1).flatten(), whole.order)
    shifts = [one.shifts.view(len(whole), -1, 3) for one in epochs]
    assert torch.equal(torch.cat(shifts, 1).view(-1, 3), whole.shifts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("count", [23, 24])
def test_first_vectors_do_not_depend_on_the_number_of_processes(dtype: torch.dtype, count: int) -> None:
    place, shape = (0, 0), torch.Size((3, 5, 5))

    def made(rank: int, size: int) -> torch.Tensor:
        share = share_of(8, count, Processes(rank, size))
        starts = WarmStarts(share.count(count), dtype, drawn=Drawn(share.batch, share.first, share.part))
        starts.prepare({place: shape})
        return starts.rows[place]

    whole = made(0, 1)
    for size in (2, 4):
        for rank in range(size):
            mine = share_of(8, count, Processes(rank, size)).samples(count)
            assert torch.equal(made(rank, size), whole[mine])


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        WrongRecipe, match="batch = 16 does not divide among 3 processes: make it a multiple of 3, or start 2"
    ):
        share_of(16, 100, Processes(0, 3))


def test_what_cannot_be_shared_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next try, with another batch, must not find a run of this one."""
    monkeypatch.setattr(Processes, "use", lambda self, device: None)
    monkeypatch.setattr(Processes, "from_first", lambda self, value: value)
    monkeypatch.setattr(Processes, "all_gathered", lambda self, value: [value])
    monkeypatch.setattr(Processes, "wait_for_long", lambda self, name: None)
    options = Options(out=tmp_path / "run", device=torch.device("cpu"), together=Processes(0, 3))
    with pytest.raises(WrongRecipe, match="does not divide among 3 processes"):
        fit(recipe(16), options, Silent())
    assert not (tmp_path / "run").exists()


def test_a_process_alone_asks_nobody() -> None:
    values = torch.ones(3)
    ALONE.add(values)
    assert values.tolist() == [1, 1, 1]
    assert ALONE.from_first("word") == "word"
    assert ALONE.all_gathered(7) == [7]
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.rows_to_first(values) == [values]
    ALONE.wait_for_long("anybody")


def test_data_and_a_chunk_may_take_longer_than_gloo_waits(folder: Path, alone: Path) -> None:
    """The others have nothing to do meanwhile, and must not take it for dead."""
    both = certify(folder, alone, "patient.jsonl", 2, SLOW="16 6", READS="6", PATIENCE="3")
    assert [row.index for row in read_rows(both)] == list(range(17))


def test_what_somebody_else_has_begun_is_refused_in_every_life(folder: Path, alone: Path, tmp_path: Path) -> None:
    """A refusal ends a process, and torchrun starts it again: that is no reason to go on with rows or runs of another."""
    rows = certify(folder, alone, "others.jsonl", 1)
    before = rows.with_suffix(".json").read_text()
    args = ["certify", str(alone), "--out", str(rows), "--data", "embedded", "--limit", "17", "--batch", "2", "--chunk", "1"]
    found = start(2, [*args, "--seed", "5", "--eps", "0.1"], restarts=1)
    assert found.returncode == 1
    assert found.stderr.count("is there already") == 2
    assert rows.with_suffix(".json").read_text() == before
    before = (alone / "environment.json").read_text()
    found = start(2, ["train", str(folder / "tiny.toml"), "--out", str(alone), "--no-evaluate"], restarts=1)
    assert found.returncode == 1
    assert found.stderr.count("already holds a run") == 2
    assert (alone / "environment.json").read_text() == before


def test_whose_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert goes_on(Processes(), "mine")
    assert not goes_on(Processes(restarts=1), None)
    assert not goes_on(Processes(restarts=1), "another")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert goes_on(Processes(restarts=1), None)
    assert not goes_on(ALONE, None)


def test_the_figures_of_an_epoch_that_was_broken_off_are_those_of_all_samples(folder: Path) -> None:
    """Two processes stop within the first epoch, one goes on: the row is that of a run that was not stopped."""
    long = ["--images", "60", "--batch", "4", "--epochs", "1", "--ramp-epochs", "1"]
    train(folder, "whole", 1, *long)
    assert "stopped at step" in train(folder, "broken-off", 2, *long, "--stop-after", "0.001", code=1)
    train(folder, "broken-off", 1, *long, "--resume")
    rows = [json.loads((folder / run / "metrics.jsonl").read_text()) for run in ("whole", "broken-off")]
    for name in ("clean", "robust", "clean_loss", "worst_loss", "local_bound"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3), name


def test_a_wish_to_stop_is_heard_soon_where_steps_are_slow(folder: Path) -> None:
    """Whoever asked kills the processes after half a minute, saved or not."""
    long = ["--images", "60", "--batch", "2", "--epochs", "1", "--ramp-epochs", "1"]
    told = train(folder, "slow", 2, *long, "--stop-after", "2", code=1, PAUSE="0.7")
    stopped = re.search(r"stopped at step (\d+) of 30", told)
    assert stopped
    assert 2 <= int(stopped[1]) <= 5


def test_a_run_that_stops_is_not_started_again(folder: Path) -> None:
    """It would train on for as long once more."""
    told = train(folder, "enough", 2, "--stop-after", "0.001", restarts=2)
    assert told.count("stopped at step") == 1


def test_all_processes_keep_vectors_in_the_bits_that_each_has_room_for(folder: Path) -> None:
    """Their rows go into one checkpoint. Catches: rows of one dtype that are received as those of another."""
    train(folder, "unlike", 2, UNLIKE="int8")
    starts = {name: rows for name, rows in state(folder / "unlike").items() if name.startswith("starts")}
    assert starts
    assert {rows.dtype for rows in starts.values()} == {torch.int8}
    assert all(bool(rows.any(1).all()) for rows in starts.values())


def test_processes_that_were_asked_for_different_things_are_refused(folder: Path, alone: Path) -> None:
    """Another seed or chunk would silently be the first one's, and rows elsewhere nobody would find again."""
    fixed = ["--data", "embedded", "--limit", "4", "--eps", "0.1", "--device", "cpu"]
    command = [sys.executable, str(DRIVER), "certify", str(alone), *fixed]
    for name, options in (("seed", ["--seed"]), ("chunk", ["--seed", "1", "--chunk"])):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        running = []
        for rank in (0, 1):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            words = [*command, "--out", str(folder / f"differing-{name}.jsonl"), *options, str(rank + 1)]
            running.append(subprocess.Popen(words, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True))
        said = "".join(process.communicate(timeout=200)[1] for process in running)
        assert f"the processes of a run differ: {name} is 1 in the first and 2 in process 1" in said
        assert all(process.returncode for process in running)


def test_too_few_images_for_a_batch_are_named() -> None:
    with pytest.raises(WrongRecipe, match="images = 5, less than a batch, does not divide among 2 processes"):
        share_of(12, 5, Processes(0, 2))
