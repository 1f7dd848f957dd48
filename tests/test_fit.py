"""Whole runs on the CPU: kills, stops, full disks and damaged files on the way, and what a finished run folder holds."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file

from locallip import cli
from locallip.certify import certify
from locallip.data import hold_out, load_images
from locallip.training import fit as fitting
from locallip.training import run as running
from locallip.training.engine import Engine
from locallip.training.evaluate import evaluate
from locallip.training.fit import Options, fit
from locallip.training.progress import Silent
from locallip.training.recipe import Recipe
from locallip.training.run import Diverged, Stopped, make_model
from locallip.training.run_folder import RunFolder, RunFolderError
from locallip.zoo import load_model

CPU = torch.device("cpu")
TRAIN, TEST = 60, 24  # images; at 16 a batch an epoch has 4 steps, its last one filled up
PER_EPOCH, TOTAL = 4, 14  # steps

#: The command with the first few images of the embedded data and a checkpoint after every epoch; {extra} may change more.
DRIVER = """
import os, signal, sys, threading, time, torch
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
if hasattr(signal, "SIGHUP"): signal.signal(signal.SIGHUP, signal.SIG_DFL)
from locallip import cli
from locallip.training import fit, run
from locallip.training.engine import Engine
whole, step = fit.load_images, Engine.step
def few(name, split, *root, **settings):
    return whole(name, split, *root, **settings).take(torch.arange({train} if split == "train" else {test}))
fit.load_images, run.CHECKPOINT_SECONDS = few, 0.0
taken = 0
def counted(engine, batch, at):
    global taken
    taken += 1
    {before}
    step(engine, batch, at)
Engine.step = counted
{extra}
sys.exit(cli.main(sys.argv[1:]))
"""

LOCAL_B = {"method": "local-b"}
RANDOM_STARTS = {"method": "local-b", "starts": "random"}
AT = {"method": "at", "attack_steps": 2}
MUON_EMA = {"method": "local-g", "optimizer": "muon", "ema": 0.9, "augment": "crop_flip", "activation": "maxmin"}
KINDS = {"saved vectors": LOCAL_B, "random starts": RANDOM_STARTS, "attacks": AT, "muon, ema, crops": MUON_EMA}


def recipe(**fields):
    base = {"name": "tiny", "data": "embedded", "architecture": "small", "method": "local-b", "eps": "0.5", "eps_train": 0.6}
    epochs = fields.get("epochs", 3.5)
    return Recipe(**{**base, "epochs": 3.5, "batch": 16, "ramp_epochs": min(2.0, epochs), "decay_epoch": 1.0, **fields})


@pytest.fixture(autouse=True)
def few_images(monkeypatch):
    """The driver's images, checkpoints and number of threads, for runs inside this process."""

    monkeypatch.setattr(fitting, "load_images", few)
    monkeypatch.setattr(running, "CHECKPOINT_SECONDS", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def signals_that_nobody_ignores():
    """As in a terminal: a job in the background, as tests may be, begins with some of them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, getattr(signal, "SIGHUP", signal.SIGTERM): signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@lru_cache
def few(name, split, root=None, **rest):
    return load_images(name, split).take(torch.arange(TRAIN if split == "train" else TEST))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run of a recipe, made once."""

    @lru_cache
    def made(r):
        out = tmp_path_factory.mktemp("whole") / "run"
        run(out, r)
        return out

    return made


def run(out, r, **options):
    return fit(r, Options(out=out, device=CPU, **{"evaluate": False, **options}), Silent())


def arguments(tmp_path, out, r, *more):
    """`locallip train` for a recipe, which becomes a file of the user's own."""
    path = tmp_path / "tiny.toml"
    fields = {key: value for key, value in dataclasses.asdict(r).items() if key != "name"}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    return ["train", str(path), "--out", str(out), "--device", "cpu", "--no-evaluate", *more]


def start(args, before="pass", extra="", stderr=subprocess.PIPE):
    code = DRIVER.format(train=TRAIN, test=TEST, before=before, extra=extra)
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8"
    )


def finished(process):
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in (err or "")
    return process.returncode, out, err


def everything(out):
    """All that a run computed: stored weights, full state with optimizer and vectors, and metrics without times."""
    last = RunFolder(out).load()
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in RunFolder(out).metrics()]
    return (out / "model.safetensors").read_bytes(), last.tensors, rows


def assert_same_run(one, other):
    (weights, state, rows), (weights_too, state_too, rows_too) = everything(one), everything(other)
    assert state.keys() == state_too.keys()
    for name, value in state.items():
        assert torch.equal(value, state_too[name]), name
    assert weights == weights_too
    assert rows == rows_too


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_at_random_and_resumed_ends_bit_equal(tmp_path, kind, whole):
    r = recipe(**KINDS[kind])
    out = tmp_path / "killed"
    draw = random.Random(kind)
    at = draw.randrange(PER_EPOCH + 1, TOTAL - 2)  # behind the first checkpoint
    kill = f"taken == {at} and threading.Timer({draw.uniform(0, 0.03)}, os.kill, (os.getpid(), signal.SIGKILL)).start()"
    wait = f"taken > {at + 2} and time.sleep(60)"  # for a machine that is faster than the timer
    process = start(arguments(tmp_path, out, r), f"({kill}, {wait})")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "model.safetensors").exists()
    run(out, r, resume=True)
    assert_same_run(whole(r), out)


def test_killed_from_outside_as_soon_as_a_checkpoint_is_seen(tmp_path, whole):
    r, out = recipe(), tmp_path / "killed"
    process = start(arguments(tmp_path, out, r), f"time.sleep(0.3 if taken > {PER_EPOCH} else 0)")
    while process.poll() is None and not list((out / "checkpoints").glob("state-*.json")):
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    run(out, r, resume=True)
    assert_same_run(whole(r), out)
    assert [row["epoch"] for row in RunFolder(out).metrics()] == [1, 2, 3, 4]


def test_a_run_that_ended_before_its_first_checkpoint_starts_over(tmp_path, monkeypatch, whole):
    r, plain, taken = recipe(), Engine.step, []

    def breaks(engine, batch, at):
        taken.append(at)
        if len(taken) == 3:
            raise MemoryError
        plain(engine, batch, at)

    monkeypatch.setattr(Engine, "step", breaks)
    with pytest.raises(MemoryError):
        run(tmp_path / "run", r)
    run(tmp_path / "run", r, resume=True)
    assert_same_run(whole(r), tmp_path / "run")


def test_an_interrupt_saves_in_the_middle_of_an_epoch_and_exits_with_130(tmp_path, whole):
    r, out = recipe(), tmp_path / "stopped"
    code, said, err = finished(start(arguments(tmp_path, out, r), "taken == 6 and os.kill(os.getpid(), signal.SIGINT)"))
    assert code == 130
    assert "stopped at step 6 of 14" in err
    assert "--resume" in err
    assert said == ""
    assert RunFolder(out).load().values["step"] == 6
    run(out, r, resume=True)
    assert_same_run(whole(r), out)


def test_a_termination_does_the_same(tmp_path, monkeypatch, whole):
    r, out = recipe(), tmp_path / "stopped"
    stop_at(monkeypatch, 6, signal.SIGTERM)
    assert cli.main(arguments(tmp_path, out, r)) == 130
    assert RunFolder(out).load().values["step"] == 6
    run(out, r, resume=True)
    assert_same_run(whole(r), out)


def test_a_closed_terminal_saves_though_nothing_can_be_said_any_more(tmp_path, whole):
    pty = pytest.importorskip("pty")
    r, out = recipe(), tmp_path / "stopped"
    ours, theirs = pty.openpty()
    last_words = "taken == 6 and (time.sleep(2), os.kill(os.getpid(), signal.SIGHUP))"
    process = start(arguments(tmp_path, out, r), last_words, stderr=theirs)
    os.close(theirs)
    os.read(ours, 1)  # it has begun to speak
    os.close(ours)
    code, said, _ = finished(process)
    assert code == 130
    assert said == ""
    assert RunFolder(out).load().values["step"] == 6
    run(out, r, resume=True)
    assert_same_run(whole(r), out)


def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(tmp_path, whole):
    r, out = recipe(), tmp_path / "run"
    process = start(arguments(tmp_path, out, r))
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert process.stdout.read() == f"{out}: trained, not evaluated\n"
    process.stdout.close()
    assert_same_run(whole(r), out)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_what_nohup_ignores_stays_ignored(tmp_path, monkeypatch, whole):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 6, signal.SIGHUP)
        run(tmp_path / "run", recipe())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert_same_run(whole(recipe()), tmp_path / "run")


@pytest.mark.parametrize("last", [1, PER_EPOCH - 1, PER_EPOCH, 2 * PER_EPOCH, TOTAL - 1, TOTAL])
def test_a_stop_at_any_step_loses_no_row_of_metrics(tmp_path, monkeypatch, last, whole):
    """Also at the last step of an epoch, and at the last of all."""
    r = recipe()
    stop_at(monkeypatch, last)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", r)
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    assert RunFolder(tmp_path / "stopped").load().values["step"] == last
    run(tmp_path / "stopped", r, resume=True)
    assert_same_run(whole(r), tmp_path / "stopped")
    assert [row["epoch"] for row in RunFolder(tmp_path / "stopped").metrics()] == [1, 2, 3, 4]


def stop_at(monkeypatch, last, number=signal.SIGINT):
    """Send this process what Ctrl-C sends, or another signal, once: in step `last`."""
    plain, taken = Engine.step, [0]

    def counted(engine, batch, at):
        plain(engine, batch, at)
        taken[0] += 1
        if taken[0] == last:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Engine, "step", counted)


def test_a_second_interrupt_breaks_off_and_handlers_come_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def impatient(engine, batch, at):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # handlers run between instructions
        pytest.fail("the second interrupt did not end the step")

    monkeypatch.setattr(Engine, "step", impatient)
    with pytest.raises(KeyboardInterrupt) as raised:
        run(tmp_path / "run", recipe())
    assert not isinstance(raised.value, Stopped)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Watched(Silent):
    """A display that knows whether it was closed: one that was not leaves a terminal without its cursor."""

    closed = False

    def close(self):
        self.closed = True


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RunFolderError])
def test_the_display_is_closed_whatever_ends_a_run(tmp_path, monkeypatch, error):
    def breaks(*args):
        raise error

    monkeypatch.setattr(Engine, "step", breaks)
    show = Watched()
    with pytest.raises(error):
        fit(recipe(), Options(out=tmp_path / "run", device=CPU), show)
    assert show.closed


def test_stop_after_saves_and_resume_goes_on(tmp_path, whole):
    r = recipe()
    out, stops = tmp_path / "stopped", 0
    while not (out / "model.safetensors").exists():
        try:
            run(out, r, resume=stops > 0, stop_after=0.05)
        except Stopped:
            stops += 1
            assert stops <= TOTAL
    assert stops > 1
    assert_same_run(whole(r), out)


def test_vectors_too_large_for_checkpoints_are_followed_before_a_run_goes_on(tmp_path, monkeypatch):
    """The epoch behind a resume has larger norms the longer random vectors are followed first: they come from below."""
    found = {}
    monkeypatch.setattr(running, "LARGEST_SAVED_STARTS", 0)
    for steps in (1, 60):
        monkeypatch.setattr(running, "HEALING_STEPS", steps)
        with pytest.raises(Stopped):
            run(tmp_path / str(steps), recipe(), stop_after=0.0)
        checkpoint = RunFolder(tmp_path / str(steps)).load()
        assert not any(name.startswith("starts.") for name in checkpoint.tensors)
        run(tmp_path / str(steps), recipe(), resume=True)
        found[steps] = torch.tensor(RunFolder(tmp_path / str(steps)).metrics()[0]["local_norms"])
    assert (found[60] > 0.999 * found[1]).all()
    assert (found[60] > 1.01 * found[1]).any()


def test_resuming_a_finished_run_changes_nothing_but_can_evaluate(tmp_path):
    r = recipe(epochs=1.5)
    first = run(tmp_path / "run", r)
    kept = everything(tmp_path / "run")
    assert first["evaluation"] is None
    again = run(tmp_path / "run", r, resume=True, evaluate=True, limit=8)
    assert everything(tmp_path / "run")[0] == kept[0]
    assert everything(tmp_path / "run")[2] == kept[2]
    assert again["model"] == first["model"]
    assert again["training"] == first["training"]
    assert again["evaluation"]["images"] == 8


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", 2e-3), ("epochs", 5.0), ("seed", 1), ("starts", "random"), ("eps", "1/2")]
)
def test_resume_with_another_recipe_is_refused(tmp_path, field, value):
    r = recipe(epochs=3.5)
    RunFolder.create(tmp_path / "run", dataclasses.asdict(r))
    with pytest.raises(RunFolderError, match=f"another recipe: {field} is"):
        run(tmp_path / "run", recipe(**{field: value}), resume=True)


def test_a_folder_that_exists_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", dataclasses.asdict(recipe()))
    with pytest.raises(RunFolderError, match="already holds a run: --resume"):
        run(tmp_path / "run", recipe())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("kept")
    with pytest.raises(RunFolderError, match=r"not empty \(thesis.tex\)"):
        run(tmp_path / "mine", recipe())
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "kept"


def test_resume_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="no run in"):
        run(tmp_path / "nothing", recipe(), resume=True)


@pytest.mark.parametrize("what", ["out", "results"])
def test_a_place_that_cannot_be_written_is_reported_before_the_first_step(tmp_path, capsys, monkeypatch, what):
    monkeypatch.setattr(Engine, "step", lambda *args: pytest.fail("training began"))
    (tmp_path / "file").write_text("kept")
    args = arguments(tmp_path, tmp_path / "run", recipe())
    wrong = str(tmp_path / "file" / "inside")
    args = [*args[:3], wrong, *args[4:]] if what == "out" else [*args, "--evaluate", "--results", wrong]
    assert cli.main(args) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_too_little_space_is_reported_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "step", lambda *args: pytest.fail("training began"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(RunFolderError, match=r"needs .* of disk space, 1.0 MB"):
        run(tmp_path / "run", recipe())


def test_a_disk_that_becomes_full_is_reported_and_the_last_checkpoint_stays_good(tmp_path, whole):
    """Files may not grow beyond 64 KiB from step 6 on: the second checkpoint does not fit."""
    r = recipe()
    out = tmp_path / "full"
    full = "taken == 6 and resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))"
    process = start(arguments(tmp_path, out, r), full, "import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    code, _, err = finished(process)
    assert code == 2
    assert "could not take the checkpoint" in err
    assert f"the last good checkpoint, {out / 'checkpoints' / f'state-{PER_EPOCH}.json'}, is kept" in err
    run(out, r, resume=True)
    assert_same_run(whole(r), out)


@pytest.mark.parametrize("name", ["model.safetensors", "result.json"])
def test_what_cannot_be_written_at_the_end_is_reported_and_can_be_had_by_resuming(tmp_path, capsys, name, whole):
    r = recipe(epochs=1.0)
    args = arguments(tmp_path, tmp_path / "run", r)
    out = tmp_path / "run"
    RunFolder.create(out, dataclasses.asdict(r))
    (out / name).mkdir()  # a folder in its place
    assert cli.main([*args, "--resume"]) == 2
    err = capsys.readouterr().err
    assert name in err.splitlines()[-1]
    assert err.count("locallip: ") == 1
    (out / name).rmdir()
    assert cli.main([*args, "--resume"]) == 0
    assert_same_run(whole(r), out)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, monkeypatch, suffix, whole):
    r = recipe()
    stop_at(monkeypatch, 10)
    out = tmp_path / "damaged"
    with pytest.raises(Stopped):
        run(out, r)
    path = out / "checkpoints" / f"state-10.{suffix}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="state-10.json cannot be used"):
        run(out, r, resume=True)
    assert_same_run(whole(r), out)


def poison(monkeypatch, at, change):
    """Change an engine's model just before step `at`, counted from 1."""
    plain, taken = Engine.step, [0]

    def counted(engine, batch, setting):
        taken[0] += 1
        if taken[0] == at:
            with torch.no_grad():
                change(engine.model)
        plain(engine, batch, setting)

    monkeypatch.setattr(Engine, "step", counted)


@pytest.mark.parametrize(("at", "last"), [(3, "no checkpoint yet"), (6, "state-4.json"), (9, "state-8.json")])
def test_a_loss_that_is_not_finite_stops_and_names_step_layer_and_checkpoint(tmp_path, capsys, monkeypatch, at, last):
    poison(monkeypatch, at, lambda model: model[2].weight.fill_(float("inf")))
    assert cli.main(arguments(tmp_path, tmp_path / "run", recipe())) == 3
    err = capsys.readouterr().err
    assert f"not finite at step {at} " in err
    assert "first in layer '2'" in err
    assert last in err
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_method_without_bounds_names_the_parameter(tmp_path, monkeypatch):
    poison(monkeypatch, 2, lambda model: model[5].weight.fill_(float("nan")))
    with pytest.raises(Diverged, match=r"step 2 \(in the logits; '0.weight'"):
        run(tmp_path / "run", recipe(method="standard"))


def test_a_huge_learning_rate_ends_in_words(tmp_path, capsys):
    wild = recipe(learning_rate=1e3, epochs=40.0, decay_epoch=40.0)
    code = cli.main(arguments(tmp_path, tmp_path / "run", wild))
    err = capsys.readouterr().err
    if code == 0:  # it held out: then its weights must be finite
        assert all(value.isfinite().all() for value in load_file(tmp_path / "run" / "model.safetensors").values())
    else:
        assert code == 3
        assert "the loss is not finite at step" in err


@pytest.mark.parametrize("at", [PER_EPOCH, TOTAL])
def test_weights_that_a_last_step_spoils_are_not_saved_as_good(tmp_path, monkeypatch, at):
    """The loss of the last step of an epoch is that before its update: it says nothing of the weights behind it."""
    plain, taken = Engine.step, [0]

    def spoiled(engine, batch, setting):
        plain(engine, batch, setting)
        taken[0] += 1
        if taken[0] == at:
            with torch.no_grad():
                engine.model[2].weight[0, 0, 0, 0] = float("nan")

    monkeypatch.setattr(Engine, "step", spoiled)
    with pytest.raises(Diverged, match=rf"not finite .*step {at} .*'2.weight'"):
        run(tmp_path / "run", recipe())
    found = RunFolder(tmp_path / "run").load()
    assert found is None or all(value.isfinite().all() for value in found.tensors.values())


def test_the_average_of_the_weights_is_what_is_stored(tmp_path):
    r = recipe(ema=0.9, epochs=2.0)
    run(tmp_path / "run", r)
    last = RunFolder(tmp_path / "run").load().tensors
    stored = load_file(tmp_path / "run" / "model.safetensors")
    model = make_model(r, (1, 28, 28), 10)
    for i, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(stored[name], last[f"average.{i}"].half())
    assert not torch.equal(stored["0.weight"], last["model.0.weight"].half())


def test_without_an_average_the_last_weights_are_stored(tmp_path):
    run(tmp_path / "run", recipe(epochs=1.0))
    last = RunFolder(tmp_path / "run").load().tensors
    for name, value in load_file(tmp_path / "run" / "model.safetensors").items():
        assert value.dtype == torch.float16
        assert torch.equal(value, last[f"model.{name}"].half())


def test_weights_too_large_for_16_bits_are_stored_in_32(tmp_path, monkeypatch):
    poison(monkeypatch, PER_EPOCH, lambda model: model[-1].bias.add_(1e5))
    result = run(tmp_path / "run", recipe(method="standard", epochs=1.0))
    assert result["model"]["dtype"] == "float32"
    assert load_model(tmp_path / "run")[-1].bias.max() > 9e4


SECTIONS = {
    "about": {"command", "commit", "date", "hardware", "torch", "python", "seed", "wall_seconds"},
    "recipe": {field.name for field in dataclasses.fields(Recipe)},
    "training": {"seconds", "epochs", "steps", "seconds_per_epoch", "peak_memory_gb", "starts_gb", "validation"},
    "evaluation": {
        *("split", "images", "eps", "clean", "pgd", "pgd_steps", "estimate", "power_steps", "certified", "guarantee"),
        *("failure_prob", "proof_seed", "global_certified", "global_lipschitz", "local_lipschitz", "seconds"),
    },
    "model": {"sha256", "parameters", "dtype"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run with everything: a validation split, an evaluation and a result file beside the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    seen, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests, which evaluate again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "load_images", few)
        plain = running.Run.__init__

        def noted(self, recipe, train, *rest):
            seen["train"] = train
            plain(self, recipe, train, *rest)

        patch.setattr(running.Run, "__init__", noted)
        r = recipe(epochs=20.0, validation=12, seed=4, learning_rate=3e-3)
        seen["result"] = run(folder / "run", r, evaluate=True, results=folder / "results")
    torch.set_num_threads(threads)
    return folder, r, seen


def test_the_result_has_the_agreed_fields(trained):
    folder, r, seen = trained
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result == seen["result"] == json.loads((folder / "results" / "tiny-seed4.json").read_text())
    assert result.keys() == SECTIONS.keys()
    for section, fields in SECTIONS.items():
        assert fields <= result[section].keys(), section
    assert result["recipe"] == dataclasses.asdict(r)
    assert result["training"]["steps"] == r.epochs * math.ceil((TRAIN - 12) / 16)
    assert result["training"]["validation"].keys() == result["evaluation"].keys()
    assert result["training"]["validation"]["split"] == "validation"
    assert (result["training"]["validation"]["images"], result["evaluation"]["images"]) == (12, TEST)


def test_a_run_without_evaluation_writes_no_result_elsewhere(tmp_path):
    run(tmp_path / "run", recipe(epochs=1.0), results=tmp_path / "results")
    assert list((tmp_path / "results").iterdir()) == []
    assert json.loads((tmp_path / "run" / "result.json").read_text())["evaluation"] is None


def test_the_stored_weights_certify_what_the_result_says(trained):
    folder, r, seen = trained
    model, test = load_model(folder / "run"), few("embedded", "test")
    found = seen["result"]["evaluation"]
    again = evaluate(model, test, r.eps, seed=r.seed, proof_seed=found["proof_seed"])
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in found.items() if k != "seconds"}
    x = test.images.float() / 255
    certificate = certify(model, x, test.labels, r.eps, seed=0, method="local")
    assert 100 * int(certificate.certified.sum()) / TEST == found["certified"]
    assert found["certified"] > 0  # a comparison of nothing with nothing would say little


def test_validation_images_take_no_part_in_training(trained):
    _, r, seen = trained
    whole = few("embedded", "train")
    rest, held = hold_out(whole, r.validation)
    assert torch.equal(seen["train"].images, rest.images)
    trained_on = {image.numpy().tobytes() for image in rest.images}
    assert len(trained_on) + len(held) == TRAIN
    assert not any(image.numpy().tobytes() in trained_on for image in held.images)


def test_metrics_have_one_row_an_epoch_with_the_setting_of_its_last_step(trained):
    folder, r, _ = trained
    rows = RunFolder(folder / "run").metrics()
    assert [row["epoch"] for row in rows] == list(range(1, 21))
    assert [row["step"] for row in rows] == [3 * epoch for epoch in range(1, 21)]
    assert [row["eps"] for row in rows[2:]] == [r.eps_train] * 18
    shown = {"clean", "robust", "local_bound", "global_bound", "learning_rate", "mix", "seconds", "local_norms", "varying"}
    assert all(shown <= row.keys() for row in rows)
    assert rows[-1]["clean_loss"] < rows[0]["clean_loss"]


def test_a_validation_split_that_leaves_nothing_to_train_on_is_a_clear_error(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, tmp_path / "run", recipe(validation=TRAIN))) in (1, 2)
    err = capsys.readouterr().err
    assert "validation" in err
    assert f"cannot hold out {TRAIN} of {TRAIN}" in err
    assert not (tmp_path / "run").exists()


def test_fewer_images_are_the_first_ones_and_more_than_there_are_a_clear_error(tmp_path, capsys):
    result = run(tmp_path / "few", recipe(images=32, epochs=2.0))
    assert result["training"]["steps"] == 4
    assert RunFolder(tmp_path / "few").load().tensors["starts.0.0"].shape[0] == 32
    assert cli.main(arguments(tmp_path, tmp_path / "run", recipe(images=TRAIN + 1))) == 2
    assert f"images = {TRAIN + 1}: embedded has {TRAIN} training images" in capsys.readouterr().err


def test_a_margin_that_crops_could_get_lost_in_is_a_clear_error_before_there_is_a_folder(tmp_path, capsys):
    assert cli.main(arguments(tmp_path, tmp_path / "run", recipe(augment="crop", crop_margin=28))) == 2
    assert capsys.readouterr().err.startswith("locallip: crop_margin = 28: the images are 28 pixels high")
    assert not (tmp_path / "run").exists()


def test_the_first_weights_follow_from_the_seed_alone():
    one = make_model(recipe(seed=1), (1, 28, 28), 10).state_dict()
    torch.rand(3)
    state = torch.get_rng_state()
    again = make_model(recipe(seed=1), (1, 28, 28), 10).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = make_model(recipe(seed=2), (1, 28, 28), 10).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_orthogonal_weights_have_singular_values_of_one():
    model = make_model(recipe(init="orthogonal"), (1, 28, 28), 10)
    for p in model.parameters():
        if p.dim() in (2, 4):
            values = torch.linalg.svdvals(p.detach().flatten(1).double())
            torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-5, atol=0)


def test_a_folder_in_use_is_refused(tmp_path):
    held = RunFolder.create(tmp_path / "run", dataclasses.asdict(recipe()))
    with held.in_use():
        script = "import sys; from locallip.training.run_folder import RunFolder\nwith RunFolder(sys.argv[1]).in_use(): pass"
        other = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True)
    assert "is in use by another process" in other.stderr
    with held.in_use():
        pass  # free again
    with pytest.raises(ValueError, match=r"^mine$"), held.in_use():  # what goes wrong inside keeps its name
        raise ValueError("mine")


def test_of_two_that_start_in_one_new_folder_the_second_leaves_no_trace(tmp_path):
    first = RunFolder(tmp_path / "run")
    first.make()
    with first.in_use():
        with pytest.raises(RunFolderError, match="is in use by another process"):
            run(tmp_path / "run", recipe(seed=2))
        assert [path.name for path in first.path.iterdir()] == ["lock"]


def test_an_evaluation_of_more_images_is_not_replaced(tmp_path):
    first = fit(recipe(), Options(out=tmp_path / "run", limit=6, results=tmp_path / "results"), Silent())
    for changes in ({"evaluate": False}, {"limit": 2}):
        again = fit(recipe(), Options(out=tmp_path / "run", resume=True, **changes), Silent())
        assert again["evaluation"] == first["evaluation"]
    others = [(recipe(batch=8), 6, "batch is 16 there and 8 now"), (recipe(), 2, "it looked at 6 images")]
    for other, limit, why in others:
        with pytest.raises(RunFolderError, match=why):
            fit(other, Options(out=tmp_path / "other", limit=limit, results=tmp_path / "results"), Silent())
        assert not (tmp_path / "other").exists()


def test_a_result_older_than_a_field_is_that_of_the_same_recipe(tmp_path):
    options = Options(out=tmp_path / "run", limit=2, results=tmp_path / "results")
    fit(recipe(), options, Silent())
    (path,) = (tmp_path / "results").glob("*.json")
    stored = json.loads(path.read_text())
    del stored["recipe"]["crop_margin"]
    path.write_text(json.dumps(stored))
    fit(recipe(), dataclasses.replace(options, out=tmp_path / "again"), Silent())
    assert "crop_margin" in json.loads(path.read_text())["recipe"]


def test_a_run_older_than_a_field_resumes_with_its_default(tmp_path):
    fit(recipe(), Options(out=tmp_path / "run", evaluate=False), Silent())
    config = tmp_path / "run" / "config.json"
    stored = json.loads(config.read_text())
    del stored["intervals"]
    config.write_text(json.dumps(stored))
    fit(recipe(), Options(out=tmp_path / "run", resume=True, evaluate=False), Silent())
