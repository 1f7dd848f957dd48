"""Run folders: what is saved comes back, whatever kills the writer, fills the disk or damages a file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from locallip.files import PART
from locallip.training.run_folder import README, RunFolder, RunFolderError

RECIPE = {"name": "tiny", "eps": "36/255", "epochs": 60, "learning_rate": 1e-3, "flip": True, "decay": None}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", RECIPE, resume=False)


def state(epoch: int, size: int = 300) -> tuple[dict, dict]:
    """Tensors and values that all show which epoch they belong to."""
    tensors = {"weight": torch.full((size,), float(epoch)), "step": torch.tensor(epoch)}
    return tensors, {"epoch": epoch, "loss": 1 / (1 + epoch)}


def save(folder: RunFolder, *epochs: int) -> None:
    for epoch in epochs:
        folder.save(epoch, *state(epoch))


def whole(checkpoint) -> int:
    """The epoch of a checkpoint, once all its parts are seen to belong to it."""
    tensors, values = state(checkpoint.step, checkpoint.tensors["weight"].numel())
    assert checkpoint.values == values
    assert checkpoint.tensors.keys() == tensors.keys()
    assert all(torch.equal(checkpoint.tensors[name], tensors[name]) for name in tensors)
    return checkpoint.step


def files(folder: RunFolder) -> set[str]:
    return {path.name for path in folder.checkpoints.iterdir()}


# What a folder holds


def test_new_folder_explains_itself(folder):
    assert json.loads((folder.path / "config.json").read_text()) == RECIPE
    about = json.loads((folder.path / "environment.json").read_text())
    assert about["torch"] == torch.__version__
    assert {"commit", "hardware", "python", "safetensors", "command"} <= about.keys()
    assert (folder.path / "README.txt").read_text() == README
    assert folder.load() is None
    assert folder.metrics() == []


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"],
)
def test_every_dtype_comes_back_bit_for_bit(folder, dtype):
    dtype = getattr(torch, dtype)
    raw = torch.arange(240, dtype=torch.uint8).reshape(30, 8)
    plain = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
    tensors = {
        "plain": plain,
        "scalar": plain.flatten()[3].clone(),
        "empty": plain[:0],
        "turned": plain.T,
        "shared": plain[2:4],
        "odd": raw[0, :3].clone(),  # would leave the next one unaligned
    }
    folder.save(1, tensors, {})
    loaded = folder.load().tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        same = [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (loaded[name], tensor)]
        assert same[0] == same[1]


def test_generator_state_and_gradients_come_back(folder):
    generator = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(3, 3))
    folder.save(1, {"random": generator.get_state(), "weight": weight}, {})
    expected = torch.rand(5, generator=generator)
    loaded = folder.load().tensors
    assert not loaded["weight"].requires_grad
    generator.set_state(loaded["random"])
    assert torch.equal(torch.rand(5, generator=generator), expected)


def test_values_come_back_exactly(folder):
    values = {"rate": 0.1 + 0.2, "best": float("inf"), "step": 2**60, "none": None, "list": [1, [2.5, "é"]], "on": True}
    folder.save(3, {}, values)
    checkpoint = folder.load()
    assert (checkpoint.step, checkpoint.tensors, checkpoint.values) == (3, {}, values)


def test_tensor_file_is_an_ordinary_safetensors_file_written_in_pieces(folder, monkeypatch):
    monkeypatch.setattr("locallip.training.tensor_file.CHUNK", 100)
    save(folder, 4)
    assert torch.equal(load_file(folder.checkpoints / "state-4.safetensors")["weight"], state(4)[0]["weight"])
    assert whole(folder.load()) == 4


def test_last_two_are_kept(folder):
    save(folder, 8, 9, 10, 11)
    assert files(folder) == {f"state-{epoch}.{kind}" for epoch in (10, 11) for kind in ("json", "safetensors")}
    assert whole(folder.load()) == 11


def test_same_epoch_again_replaces_the_first(folder):
    save(folder, 1)
    folder.save(1, {"weight": torch.zeros(2)}, {"again": True})
    assert folder.load().values == {"again": True}
    save(folder, 1)
    assert whole(folder.load()) == 1
    assert len(files(folder)) == 2


def test_going_back_drops_the_abandoned_future(folder):
    save(folder, 5, 6)
    damage(folder, 6)
    save(folder, 4)
    assert whole(folder.load()) == 4


def test_what_cannot_be_saved_is_refused_before_anything_is_written(folder):
    save(folder, 1)
    before = files(folder)
    with pytest.raises(TypeError, match=r"'bad'.*complex64"):
        folder.save(2, {"bad": torch.zeros(2, dtype=torch.complex64)}, {})
    with pytest.raises(TypeError, match=r"'bad'.*list"):
        folder.save(2, {"bad": [1.0]}, {})
    with pytest.raises(TypeError):
        folder.save(2, {}, {"bad": torch.zeros(1)})
    assert files(folder) == before


# Starting and resuming


def test_folder_with_a_run_is_not_overwritten(folder):
    with pytest.raises(RunFolderError, match="already holds a run: --resume goes on with it, another --out starts anew"):
        RunFolder.create(folder.path, RECIPE, resume=False)


def test_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "README.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"not empty \(README.txt\)"):
        RunFolder.create(tmp_path, RECIPE, resume=False)
    assert (tmp_path / "README.txt").read_text() == "mine"


def test_start_that_was_killed_at_once_can_be_repeated(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / f"config.json{PART}").write_text("{")
    folder = RunFolder.create(tmp_path, RECIPE, resume=False)
    assert not list(folder.path.glob(f"*{PART}"))


def test_resume_goes_on_and_notes_where(folder):
    save(folder, 1)
    (folder.checkpoints / f"state-2.safetensors{PART}").write_bytes(b"half")
    again = RunFolder.create(folder.path, dict(RECIPE), resume=True)
    assert whole(again.load()) == 1
    assert f"state-2.safetensors{PART}" not in files(again)
    RunFolder.create(folder.path, RECIPE, resume=True)
    assert len(json.loads((folder.path / "environment.json").read_text())["resumed"]) == 2


def test_resume_without_environment_or_readme_restores_them(folder):
    (folder.path / "environment.json").write_text("{")
    (folder.path / "README.txt").unlink()
    RunFolder.create(folder.path, RECIPE, resume=True)
    assert "resumed" in json.loads((folder.path / "environment.json").read_text())
    assert (folder.path / "README.txt").exists()


def test_resume_names_every_field_that_differs(folder):
    other = {**RECIPE, "epochs": 120, "eps": "8/255", "seed": 1}
    del other["flip"]
    with pytest.raises(RunFolderError) as error:
        RunFolder.create(folder.path, other, resume=True)
    for part in ("epochs is 60 there and 120 now", "eps is '36/255' there and '8/255' now"):
        assert part in str(error.value)
    assert "seed is absent there and 1 now" in str(error.value)
    assert "flip is True there and absent now" in str(error.value)
    assert "learning_rate" not in str(error.value)
    assert json.loads((folder.path / "config.json").read_text()) == RECIPE


def test_resume_without_a_run_is_a_clear_error(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunFolderError, match=r"there is no run in .* to resume: leave out --resume"):
            RunFolder.create(path, RECIPE, resume=True)
    assert not (tmp_path / "none").exists()


def test_resume_with_damaged_config_is_a_clear_error(folder):
    (folder.path / "config.json").write_text('{"name": ')
    with pytest.raises(RunFolderError, match=r"config\.json is not valid JSON"):
        RunFolder.create(folder.path, RECIPE, resume=True)


# Disks and folders that do not take it


def test_unwritable_places_are_reported(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run", Path("/proc/no_such_folder/run")):
        with pytest.raises(RunFolderError, match=str(path)):
            RunFolder.create(path, RECIPE, resume=False)
        with pytest.raises(RunFolderError, match="cannot be written to"):
            RunFolder(path).check_space(1)
        with pytest.raises(RunFolderError, match=r"checkpoint of step 1.*there is no earlier checkpoint"):
            RunFolder(path).save(1, *state(1))
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl"):
            RunFolder(path).append_metrics({"epoch": 1})


def test_space_is_checked_and_nothing_is_left_behind(folder):
    folder.check_space(1)
    with pytest.raises(RunFolderError, match=r"needs 1000000000\.0 GB \(1,000,000,000,000,000,000 bytes\).* are free"):
        folder.check_space(10**18)
    assert files(folder) == set()


def test_space_that_checkpoints_take_already_is_not_asked_for_again(folder, monkeypatch):
    """A run that had room for three goes on where two of them are there."""
    for step in (1, 2):
        folder.save(step, {"a": torch.zeros(250_000)}, {})
    usage = shutil.disk_usage(folder.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_010_000))
    folder.check_space(3_000_000)
    with pytest.raises(RunFolderError, match="disk space"):
        folder.check_space(4_000_000)


def test_full_disk_keeps_the_last_checkpoint(folder, monkeypatch):
    save(folder, 1, 2)
    before = files(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("locallip.training.run_folder.write_tensors", full)
        with pytest.raises(RunFolderError, match=r"step 3: No space left on device; the last good .*state-2\.json, is kept"):
            save(folder, 3)
    assert files(folder) == before
    assert whole(folder.load()) == 2
    save(folder, 3)
    assert whole(folder.load()) == 3


#: Runs in a process of its own, which may not write files beyond some size: the system itself refuses then.
TOO_LARGE = """
import resource, signal, sys
from locallip.training.run_folder import RunFolder, RunFolderError
from tests.test_run_folder import files, state, whole
folder = RunFolder(sys.argv[1])
folder.save(1, *state(1))
folder.append_metrics({"epoch": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
before = files(folder)
try:
    folder.save(2, *state(2, size=100_000))
except RunFolderError as error:
    print(error)
try:
    folder.append_metrics({"epoch": 2, "text": "x" * 30_000})
except RunFolderError as error:
    print(error)
assert files(folder) == before
assert whole(folder.load()) == 1
folder.append_metrics({"epoch": 2})
assert folder.metrics() == [{"epoch": 1}, {"epoch": 2}]
"""


def test_file_that_the_system_refuses_to_let_grow(folder):
    done = run_script(TOO_LARGE, folder.path)
    assert "File too large; the last good checkpoint" in done
    assert "state-1.json, is kept" in done
    assert "metrics.jsonl" in done


def run_script(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Kills


CALLS = ("replace", "fsync", "unlink")


@pytest.mark.parametrize("first", [[], [1], [1, 2]])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_failure_at_any_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, first, error):
    """The k-th call of os.replace, os.fsync or os.unlink fails, for every k."""
    completed = False
    for k in range(40):
        folder = RunFolder.create(tmp_path / str(k), RECIPE, resume=False)
        save(folder, *first)
        with monkeypatch.context() as patch:
            count = break_call(patch, k, error)
            try:
                save(folder, 3)
                completed = True
            except (RunFolderError, KeyboardInterrupt):
                completed = False
        left = folder.load()
        assert (left is None and not first) or whole(left) in {3, *first[-1:]}
        assert not completed or whole(left) == 3
        assert not [name for name in files(folder) if name.endswith(".safetensors.part")]
        save(folder, 4)  # and the folder goes on to be of use
        assert whole(folder.load()) == 4
        assert len(files(folder)) <= 4
        if count[0] <= k:
            break
    assert completed
    assert k >= 6  # two files and the folder twice are synced, and two files renamed


def break_call(patch, k, error):
    count = [0]

    def breaking(original):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == k + 1:
                raise error
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        patch.setattr(os, name, breaking(getattr(os, name)))
    return count


#: Forks children that save and die by SIGKILL, before the k-th call into the system or after some milliseconds.
KILLED = """
import os, random, shutil, signal, sys, time, warnings
from pathlib import Path
import torch
from locallip.training.run_folder import RunFolder
from tests.test_run_folder import CALLS, RECIPE, save, state, whole
torch.set_num_threads(1)
warnings.simplefilter("error")  # a checkpoint that is passed over as damaged counts as a failure here

def child(path, work):
    pid = os.fork()
    if pid == 0:
        work(RunFolder(path))
        os._exit(0)
    return pid

def kill_at(k):
    count = [0]
    def dying(original):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == k + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        return call
    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))

def dies_at(k):
    def work(folder):
        kill_at(k)
        save(folder, 3)
    return work

def saves_forever(folder):
    epoch = folder.load().step
    while True:
        epoch += 1
        folder.save(epoch, *state(epoch, size=50_000))

root = Path(sys.argv[1])
for k in range(40):
    folder = RunFolder.create(root / str(k), RECIPE, resume=False)
    save(folder, 1, 2)
    pid = child(folder.path, dies_at(k))
    died = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert whole(folder.load()) in ((2, 3) if died else (3,))
    folder = RunFolder.create(folder.path, RECIPE, resume=True)
    save(folder, 3, 4)
    assert whole(folder.load()) == 4
    assert len(list(folder.checkpoints.iterdir())) == 4
    if not died:
        break
assert k >= 6 and not died
folder = RunFolder.create(root / "loop", RECIPE, resume=False)
begin = time.perf_counter()
folder.save(1, *state(1, size=50_000))
usual = time.perf_counter() - begin
reached = []
for seed in range(400):
    if seed >= 25 and reached[-1] > 5:  # at least so many kills, and more where a busy machine saves seldom
        break
    pid = child(folder.path, saves_forever)
    time.sleep(random.Random(seed).uniform(0, 6 * usual))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reached.append(whole(folder.load()))
assert reached == sorted(reached) and reached[-1] > 5, reached
folder = RunFolder.create(folder.path, RECIPE, resume=True)
folder.save(reached[-1] + 1, *state(reached[-1] + 1))
assert len(list(folder.checkpoints.iterdir())) == 4
print("survived", k, reached[-1])
"""


def test_killed_at_every_call_and_at_random_moments(tmp_path):
    assert "survived" in run_script(KILLED, tmp_path)


# Damage


def damage(folder: RunFolder, epoch: int) -> None:
    path = folder.checkpoints / f"state-{epoch}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(folder: RunFolder, epoch: int, kind: str) -> None:
    path = folder.checkpoints / f"state-{epoch}.{kind}"
    path.write_bytes(path.read_bytes()[:-20])


def change_json(folder: RunFolder, epoch: int, old: str, new: str) -> None:
    path = folder.checkpoints / f"state-{epoch}.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


DAMAGES = {
    "one bit": (damage, r"state-2\.safetensors is damaged: SHA-256"),
    "short": (lambda f, e: truncate(f, e, "safetensors"), r"state-2\.safetensors is damaged"),
    "missing": (lambda f, e: (f.checkpoints / f"state-{e}.safetensors").unlink(), r"state-2\.safetensors is missing"),
    "short json": (lambda f, e: truncate(f, e, "json"), "not valid JSON"),
    "empty json": (lambda f, e: (f.checkpoints / f"state-{e}.json").write_bytes(b""), "not valid JSON"),
    "binary json": (lambda f, e: (f.checkpoints / f"state-{e}.json").write_bytes(b"\x80\x04\x00\xff"), "not valid JSON"),
    "list": (lambda f, e: (f.checkpoints / f"state-{e}.json").write_text("[]"), "does not hold a JSON object"),
    "no hash": (lambda f, e: change_json(f, e, '"sha256"', '"sha1"'), "'sha256' is missing"),
    "value": (lambda f, e: change_json(f, e, '"loss": 0.33', '"loss": 0.34'), "not those that were saved"),
    "other epoch": (lambda f, e: change_json(f, e, '"step": 2,\n "values"', '"step": 7,\n "values"'), "not those"),
    "number": (lambda f, e: change_json(f, e, '"state-2.safetensors"', "5"), "state-2.json cannot be used"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_newest_falls_back_with_a_warning(folder, kind):
    save(folder, 1, 2)
    work, message = DAMAGES[kind]
    work(folder, 2)
    with pytest.warns(UserWarning, match=r"state-2\.json cannot be used") as caught:
        assert whole(folder.load()) == 1
    assert len(caught) == 1
    assert caught[0].message.args[0].count("earlier checkpoint") == 1
    with pytest.warns(UserWarning, match=message):
        folder.load()


def test_nothing_whole_is_an_error_that_names_both(folder):
    save(folder, 1, 2)
    damage(folder, 1)
    truncate(folder, 2, "json")
    with (
        pytest.warns(UserWarning, match="cannot be used"),
        pytest.raises(RunFolderError, match=r"state-2\.json .*state-1\.json"),
    ):
        folder.load()


def test_broken_head_of_a_tensor_file_with_the_right_hash(folder):
    """A file that hashes right and still is no safetensors file: passed over, never unpickled."""
    import hashlib
    import pickle

    save(folder, 1, 2)
    content = pickle.dumps({"weight": 1})
    path = folder.checkpoints / "state-2.safetensors"
    change_json(folder, 2, hashlib.sha256(path.read_bytes()).hexdigest(), hashlib.sha256(content).hexdigest())
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"state-2\.json cannot be used"):
        assert whole(folder.load()) == 1


# Metrics


def test_metrics_are_lines_of_json_without_nan(folder):
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": float("nan"), "bounds": [float("inf"), {"low": -float("inf")}]}]
    for row in rows:
        folder.append_metrics(row)
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1], parse_constant=pytest.fail) == {"epoch": 2, "loss": None, "bounds": [None, {"low": None}]}
    assert folder.metrics()[0] == rows[0]


def test_metrics_are_cut_at_the_epoch_of_the_checkpoint(folder):
    folder.truncate_metrics(3)  # nothing there yet
    for epoch in range(1, 6):
        folder.append_metrics({"epoch": epoch})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 6, "lo')
    assert [row["epoch"] for row in folder.metrics()] == [1, 2, 3, 4, 5]
    folder.truncate_metrics(3)
    folder.append_metrics({"epoch": 4, "again": True})
    assert (folder.path / "metrics.jsonl").read_text().count("\n") == 4
    assert folder.metrics()[2:] == [{"epoch": 3}, {"epoch": 4, "again": True}]


def test_damaged_line_of_metrics_is_named(folder):
    (folder.path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo\n7\n{"epoch": 3}\n')
    with pytest.warns(UserWarning, match="is damaged and left out") as caught:
        assert folder.metrics() == [{"epoch": 1}, {"epoch": 3}]
    assert [f"line {number}" in str(w.message) for number, w in zip((2, 3), caught, strict=True)] == [True, True]
