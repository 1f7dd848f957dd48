"""A fifteenth round of attempts, on the programs: edited rows, odd files of networks, images and questions."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import locallip as ll
from locallip.activations.clip import clip
from locallip.certify import Certifier
from locallip.data import ImageSet, pixels
from locallip.norms import Guarantee
from locallip.proofs import Job, WrongRows, certify_images, verify_rows
from locallip.proofs.rows import Row, append_rows, read_rows
from locallip.proofs.run import chunk_seed
from locallip.proofs.settings import about_file
from locallip.proofs.summary import summarize
from locallip.zoo import WrongModel
from tests.onnx_graphs import Graph, images_for, residual, written

COUNT = 8


class Case:
    """A network, images with the classes that it gives them but for the first, and the rows about them."""

    def __init__(self, model: nn.Module, images: ImageSet, folder: Path):
        self.model, self.images, self.out = model, images, folder / "rows.jsonl"

    def run(self, eps: str, **options: Any) -> list[Row]:
        rows, *_ = certify_images(Job("mine", eps, seed=5, out=self.out, **options), self.model, self.images)
        return rows

    def forge(self, which: Callable[[Row], bool], **changes: Any) -> None:
        """Change fields of some rows, and write the summary that fits them."""
        new = [dataclasses.replace(row, **changes) if which(row) else row for row in read_rows(self.out)]
        assert new != read_rows(self.out)
        self.out.unlink()
        append_rows(self.out, new)
        about = json.loads(about_file(self.out).read_text())
        about_file(self.out).write_text(json.dumps({**about, "summary": summarize(new)}))

    def verified(self) -> list[str]:
        return verify_rows(self.out, self.model, self.images, sample=COUNT)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 3, 4))
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    images = torch.from_numpy(images_for((1, 8, 8), COUNT))
    labels = model(pixels(images).double()).argmax(1)
    labels[0] = (labels[0] + 1) % 4
    return Case(model, ImageSet("eight", "test", images, labels, ("a", "b", "c", "d")), tmp_path)


# Rows ------------------------------------------------------------------------------------------------------------------


def test_rows_about_more_images_than_there_are_are_refused(case: Case) -> None:
    """The settings said a million images, and verify confirmed a million rows."""
    case.run("0.1")
    about = json.loads(about_file(case.out).read_text())
    about["settings"]["images"] = 10**6
    about_file(case.out).write_text(json.dumps(about))
    with pytest.raises(WrongRows, match="is about other images than these of eight: 1000000 of 'eight'"):
        case.verified()


@pytest.mark.parametrize(
    ("there", "twice"),
    [
        ('"guarantee": "high_probability"', '"guarantee": "deterministic", "guarantee": "high_probability"'),
        ('"summary": {', '"summary": {"certified": 100.0}, "summary": {'),
        ('"images": 8,\n  "correct"', '"images": 10000, "images": 8,\n  "correct"'),
    ],
)
def test_settings_that_say_two_things_are_refused(case: Case, there: str, twice: str) -> None:
    """One reader of JSON takes the first of two fields and another the last: as in rows, none may be there twice."""
    case.run("0.1")
    text = about_file(case.out).read_text()
    assert text.count(there) == 1
    about_file(case.out).write_text(text.replace(there, twice))
    with pytest.raises(WrongRows, match="a field is there twice"):
        case.verified()


def test_an_attacked_row_claims_no_lead(case: Case) -> None:
    """Its margin was believed where no bound stood beside it."""
    rows = case.run("2")
    assert "ATTACKED" in {row.verdict for row in rows}
    case.forge(lambda row: row.verdict == "ATTACKED", margin=5.0, lipschitz=None)
    assert "it is ATTACKED with a margin of 5.0, which would prove it" in case.verified()[0]


@pytest.mark.parametrize("changes", [{"margin": -1e-9}, {"lipschitz": 1e-9}, {"margin": 3.0}])
def test_a_row_that_was_decided_without_bounds_has_none(case: Case, changes: dict[str, float]) -> None:
    """A wrong image had any margin and any local bound that somebody wrote into its row."""
    case.run("0.1")
    case.forge(lambda row: row.decided_by == "clean logits", **changes)
    assert "row 0: it was decided without any bound" in case.verified()[0]


def test_an_image_that_few_starts_break_is_broken_again(tmp_path: Path) -> None:
    """PGD breaks it from one start in ten, and verify tried five others and no other attack: an honest row was refused."""
    torch.manual_seed(2)
    layers = (nn.Conv2d(1, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 3, 4))
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    pictures = torch.from_numpy(images_for((1, 8, 8), 24, seed=2)[17:18])
    x = pixels(pictures)
    images = ImageSet("one", "test", pictures, model(x.double()).argmax(1), ("a", "b", "c", "d"))
    certifier, broken = Certifier(model, (1, 8, 8), method="local"), list[int]()
    for seed in range(40):
        certifier.seed_again(chunk_seed(seed, 0))
        if certifier(x, images.labels, "0.6").decided_by == ["attack"]:
            broken.append(seed)
    assert 0 < len(broken) < 20
    lucky = Case(model, images, tmp_path)
    certify_images(Job("mine", "0.6", seed=broken[0], method="local", out=lucky.out), model, images)
    assert [row.verdict for row in read_rows(lucky.out)] == ["ATTACKED"]
    assert [lucky.verified() for _ in range(3)] == [[], [], []]


def test_a_tie_is_not_called_misclassified(tmp_path: Path) -> None:
    """Nothing is surely ahead, so the verdict is UNKNOWN: a row that says MISCLASSIFIED was confirmed."""
    layer = nn.Linear(4, 3, bias=False).double().requires_grad_(False)
    layer.weight.copy_(torch.tensor([[1.0] * 4, [1.0] * 4, [-1.0] + [0.0] * 3]))
    images = ImageSet("ties", "test", torch.full((3, 1, 2, 2), 100, dtype=torch.uint8), torch.arange(3), ("a", "b", "c"))
    tied = Case(nn.Sequential(nn.Flatten(), layer).eval(), images, tmp_path)
    rows = tied.run("0.1")
    assert [(row.verdict, row.prediction) for row in rows] == [("UNKNOWN", None), ("UNKNOWN", None), ("MISCLASSIFIED", None)]
    assert tied.verified() == []
    tied.forge(lambda row: row.index == 1, verdict="MISCLASSIFIED")
    assert [fault.partition(" with")[0] for fault in tied.verified()] == [
        "row 1: it is said to be MISCLASSIFIED, and UNKNOWN"
    ]


def test_a_later_check_has_no_smaller_bound_than_there_is(case: Case) -> None:
    """Where an earlier check just succeeds a later one may have decided, by a smaller bound: any was believed, even 1e-9."""
    x, y = pixels(case.images.images[1:2]).double(), case.images.labels[1:2]
    one, two = (float(ll.certify(case.model, x, y, size, attack_steps=0).margin) for size in (0.01, 0.02))
    rows = case.run(str(0.99 * (0.01 + 0.01 * one / (one - two))), attack_steps=0)
    assert rows[1].decided_by == "global bound"
    for check in ("local bound", "slopes and local bound"):
        case.forge(lambda row: row.index == 1, decided_by=check, lipschitz=1e-9)
        assert "row 1: its bound is 1e-09, and the smallest that" in case.verified()[0]


@pytest.mark.parametrize(
    ("there", "other"),
    [
        (",0.1,", ",1_0e-2,"),
        (",0.1,", ", 0.1,"),
        ("1e-09", "1e-0_9"),
        ("MISCLASSIFIED", '"MISCLASS\nIFIED"'),
        ("\n0,", "\n\uff10,"),
    ],
)
def test_words_and_numbers_of_a_table_are_read_as_others_read_them(case: Case, there: str, other: str) -> None:
    """Python takes 1_0 for ten, blanks for nothing and full-width digits for digits; a word over two lines became one."""
    case.out = case.out.with_suffix(".csv")
    case.run("0.1")
    assert case.verified() == []
    text = case.out.read_text()
    assert there in text
    case.out.write_text(text.replace(there, other, 1), encoding="utf-8")
    with pytest.raises(WrongRows, match=r"is not what it should be|unknown verdict"):
        case.verified()


@pytest.mark.parametrize("name", ["norm", "guarantee", "more"])
def test_rows_of_others_print_nothing_that_a_terminal_obeys(case: Case, name: str) -> None:
    case.run("0.1")
    value = "\x1b[31mX"
    lines = [json.loads(line) for line in case.out.read_text().splitlines()]
    lines[0] |= {value: 1} if name == "more" else {name: value}
    case.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(WrongRows) as caught:
        case.verified()
    assert "\x1b" not in str(caught.value)
    assert "X" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("model", "a\x1b[31m\nrows agree"), ("fingerprint", "\x1b[31m")])
def test_settings_of_others_print_nothing_that_a_terminal_obeys(case: Case, name: str, value: str) -> None:
    case.run("0.1")
    about = json.loads(about_file(case.out).read_text())
    about["settings"] |= {"fingerprint": "another", name: value}
    about_file(case.out).write_text(json.dumps(about))
    with pytest.raises(WrongRows, match="is about other weights") as caught:
        case.verified()
    assert str(caught.value).isprintable()


def test_settings_of_others_keep_nobody_busy(case: Case) -> None:
    """The command takes at most a million steps, and the settings of rows a thousand times that."""
    case.run("0.1")
    about = json.loads(about_file(case.out).read_text())
    about["settings"]["attack_steps"] = 10**9
    about_file(case.out).write_text(json.dumps(about))
    with pytest.raises(WrongRows, match="the setting attack_steps = '1000000000' is not what it should be"):
        case.verified()


def test_settings_of_others_lead_into_no_other_folder(command, case: Case) -> None:
    """The name .. was looked for beside the rows as if it were a folder of images."""
    case.run("0.1")
    about = json.loads(about_file(case.out).read_text())
    about["settings"]["data"] = ".."
    about_file(case.out).write_text(json.dumps(about))
    code, _, said = command("verify", case.out)
    assert (code, "there is no data set '..'" in said) == (2, True)


@pytest.mark.parametrize("norm", ["2", "inf"])
@pytest.mark.parametrize(
    ("guarantee", "method", "deployed"),
    [
        (Guarantee.HIGH_PROBABILITY, "auto", "float32"),
        (Guarantee.DETERMINISTIC, "thorough", None),
        (Guarantee.ESTIMATE, "lines", "float32"),
        (Guarantee.ESTIMATE, "local", None),
    ],
)
def test_honest_rows_are_confirmed(case: Case, norm: str, guarantee: Guarantee, method: Any, deployed: str | None) -> None:
    """What the new checks refuse nobody has who tells the truth: rows of all verdicts, with and without radii."""
    options = {"norm": norm, "guarantee": guarantee, "method": method, "deployed_dtype": deployed}
    for radii in (False, True):
        rows = case.run({"2": "0.4", "inf": "0.06"}[norm], radii=radii, **options)
        assert len({row.verdict for row in rows}) >= 3
        assert case.verified() == []
        case.out = case.out.with_name("radii.csv")


@pytest.mark.parametrize(("kept", "rest"), [(0, "garbage"), (0, ""), (4, '{"index": '), (5, "{"), (COUNT, "")])
def test_what_a_crash_left_of_a_line_is_written_anew(case: Case, kept: int, rest: str) -> None:
    def told(rows: list[Row]) -> list[Row]:
        return [dataclasses.replace(row, seconds=0.0) for row in rows]

    whole = told(case.run("0.1", chunk=3, batch_size=3))
    lines = case.out.read_text().splitlines(keepends=True)
    case.out.write_text("".join(lines[:kept]) + rest)
    assert told(case.run("0.1", chunk=3, batch_size=3, resume=True)) == whole
    assert case.verified() == []


@pytest.mark.parametrize("lines", [[0, 1, 1], [0, 2], [1, 0], [0, 1, 2, 3, 4, 5, 6, 7, 7]])
def test_rows_that_are_missing_or_there_twice_are_not_continued(case: Case, lines: list[int]) -> None:
    case.run("0.1", chunk=3)
    there = case.out.read_text().splitlines(keepends=True)
    case.out.write_text("".join(there[i] for i in lines))
    with pytest.raises(WrongRows, match=r"are not those of the images 0, 1, 2, \.\.\. up to 7 in order"):
        case.run("0.1", chunk=3, resume=True)


# ONNX ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(None, None), (0.0, None), (-0.5, None), (None, 0.5)])
def test_a_clip_of_float64_with_one_end_is_attacked(
    command, tmp_path: Path, ends: tuple[float | None, float | None]
) -> None:
    """Its other end is the largest number of float64, which the attack in float32 could not hold: a fault in locallip."""
    graph = Graph("n", 5, opset=13)
    z = graph.add(
        "Clip", graph.add("Gemm", "x", graph.weight(5, 4)), *("" if end is None else graph.stored(end) for end in ends)
    )
    path = written(graph.model(graph.add("Gemm", z, graph.weight(4, 3))), tmp_path / "net.onnx")
    network, images = ll.load_onnx(path), np.random.default_rng(0).random((6, 5), dtype=np.float32)
    labels = network(torch.from_numpy(images).double()).argmax(1).numpy()
    np.savez(tmp_path / "images.npz", images=images, labels=labels)
    code, out, said = command("certify", path, "--data", tmp_path / "images.npz", "--eps", "3", "--json")
    assert code == 0, said
    assert json.loads(out)["summary"]["verdicts"]["ATTACKED"] > 0


@pytest.mark.parametrize("low", [-1e300, -1.0])
@pytest.mark.parametrize("high", [1e300, 1.0])
@pytest.mark.parametrize("grad", [False, True])
def test_thresholds_beyond_float32_cut_nothing_off_there(low: float, high: float, grad: bool) -> None:
    z = torch.tensor([-3e38, -2.0, 0.5, 2.0, 3e38], requires_grad=grad)
    found = clip(low, high)(z).detach()
    assert torch.equal(found, z.detach().double().clamp(low, high).float())


@pytest.mark.parametrize("curve", [nn.LeakyReLU(1e100), nn.ELU(1e100)])
def test_slopes_beyond_float32_are_no_fault(curve: nn.Module) -> None:
    """Searches in float32 meet a number that it cannot hold. Catches: an error of torch, and a wrong answer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), curve, nn.Linear(4, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    y = model(x).argmax(1)
    radius = ll.certified_radius(model, x, y, guarantee="deterministic", branch_seconds=0.2)
    move = torch.randn(2000, 8, 3, dtype=torch.float64)
    near = x + move / move.norm(dim=2, keepdim=True) * radius[:, None]
    assert bool((model(near.flatten(0, 1)).argmax(1) == y.repeat(2000)).all())
    assert len(ll.certify(model, x, y, 0.6).verdicts) == 8


def typed(model: onnx.ModelProto, kind: Any) -> None:
    """Every weight in the list of numbers of its type, in place of raw bytes."""
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        if kind is np.float64:
            tensor.double_data.extend(array.ravel().tolist())
        elif kind is np.float32:
            tensor.float_data.extend(array.ravel().tolist())
        else:
            tensor.int32_data.extend(array.view(np.uint16).ravel().astype(int).tolist())


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_weights_as_lists_of_numbers_are_those_of_raw_bytes(kind: Any, tmp_path: Path) -> None:
    """float16 numbers stand in a list of whole ones, by their bits."""
    _, model = residual(kind)
    raw = ll.load_onnx(written(model, tmp_path / "raw.onnx")).state_dict()
    typed(model, kind)
    listed = ll.load_onnx(written(model, tmp_path / "listed.onnx")).state_dict()
    assert raw.keys() == listed.keys()
    assert all(torch.equal(raw[name], listed[name]) for name in raw)


def two_domains(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("ai.onnx", 13))


def two_kinds_of_value(model: onnx.ModelProto) -> None:
    attribute = next(node for node in model.graph.node if node.op_type == "Conv").attribute[0]
    attribute.floats.append(2.0)


def no_type(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Conv").attribute[0].ClearField("type")


def a_mask(model: onnx.ModelProto) -> None:
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    relu.output.append("mask")


def no_batch(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0


def a_sequence(model: onnx.ModelProto) -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.DOUBLE, [1, 2, 6, 6]))
    model.graph.input[0].type.CopyFrom(kind)


def another_type(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (two_domains, "it names 2 versions of ONNX's operators"),
        (two_kinds_of_value, "mismatch in attribute"),
        (no_type, "(Conv 'the Conv'): the attribute 'pads' is of a type that is not understood"),
        (a_mask, "(Relu 'the Relu'): it gives more than one value"),
        (no_batch, "has 0 as its first dimension"),
        (a_sequence, "is of type UNDEFINED"),
        (another_type, "node 0 (Sub 'the Sub'): it mixes float64 with the float32"),
    ],
)
def test_files_that_say_two_things_are_refused(change: Callable[[onnx.ModelProto], None], told: str, tmp_path: Path) -> None:
    _, model = residual()
    change(model)
    with pytest.raises(WrongModel) as caught:
        ll.load_onnx(written(model, tmp_path / "net.onnx"))
    assert told in str(caught.value)


def two_products(g: Graph, z: str) -> str:
    return g.add("Sub", g.add("Gemm", z, g.weight(4, 4)), g.add("Gemm", z, g.weight(4, 4), g.weight(4)))


def three_ways(g: Graph, z: str) -> str:
    return g.add("Add", g.add("Add", z, g.add("Mul", z, g.weight(4))), g.add("Mul", z, g.weight(4)))


def two_kinks(g: Graph, z: str) -> str:
    return g.add("Add", g.add("Relu", g.add("Mul", z, g.weight(4))), g.add("Relu", z))


@pytest.mark.parametrize("block", [two_products, three_ways, two_kinks])
def test_branches_that_join_again_cost_no_more_with_every_one(block: Callable[[Graph, str], str], tmp_path: Path) -> None:
    """Paths through sixteen of them are 2^16 and more: who followed each would not end."""
    graph, z = Graph(1, 4), "x"
    for _ in range(16):
        z = block(graph, z)
    network = ll.load_onnx(written(graph.model(graph.add("Gemm", z, graph.weight(4, 3))), tmp_path / "net.onnx"))
    x = torch.rand(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ll.certify(network, x, network(x).argmax(1), eps=1e-9, attack_steps=1)
    assert found.certified.all()


# Images ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def network_file(tmp_path: Path) -> Path:
    return written(residual(np.float32)[1], tmp_path / "net.onnx")


@pytest.mark.parametrize(("value", "told"), [(1 + 1e-9, "1.000000001"), (-1e-12, "run from -1e-12 to 0.5")])
def test_pixels_just_outside_are_told_with_all_digits(command, network_file: Path, value: float, told: str) -> None:
    """`images run from 0 to 1, expected floats in [0, 1]` says nothing."""
    images = np.full((2, 2, 6, 6), 0.5)
    images[0, 0, 0, 0] = value
    np.savez(network_file.with_name("images.npz"), images=images, labels=np.zeros(2, int))
    code, _, said = command("certify", network_file, "--data", network_file.with_name("images.npz"), "--eps", "0.1")
    assert (code, told in said) == (2, True)


def test_a_folder_with_the_number_of_no_class_is_told(command, tmp_path: Path) -> None:
    """99999999999999999999 is beyond int64, which was a traceback."""
    image = pytest.importorskip("PIL.Image").fromarray(np.zeros((6, 6), np.uint8))
    graph = Graph("n", 1, 6, 6, kind=np.float32)
    path = written(graph.head("x"), tmp_path / "net.onnx")
    for name in ("0", "9" * 20):
        (tmp_path / "data" / name).mkdir(parents=True)
        image.save(tmp_path / "data" / name / "0.png")
    code, _, said = command("certify", path, "--data", tmp_path / "data", "--eps", "0.1")
    assert (code, "the network tells 3 classes apart" in said) == (2, True)


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


HUGE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 2, 6, 6), }".ljust(117)
    + b"\n"
)


@pytest.mark.parametrize(
    "content", [HUGE, HUGE[:40], b"", saved(np.zeros((3, 2, 6, 6), "datetime64[s]")), saved(np.zeros(3, "c16"))]
)
def test_arrays_that_are_none_are_told(command, network_file: Path, content: bytes) -> None:
    """Sizes without their numbers, headers that are cut short, and types that are no pixels."""
    path = network_file.with_name("images.npz")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", content)
        archive.writestr("labels.npy", saved(np.zeros(3, int)))
    code, _, said = command("certify", network_file, "--data", path, "--eps", "0.1")
    assert (code, said.count("\n"), "images.npz" in said) == (2, 1, True)


@pytest.mark.parametrize("kind", [">f4", "<f8", "float16", "longdouble"])
def test_floats_of_any_kind_and_order_are_the_same_pixels(kind: str, tmp_path: Path) -> None:
    from locallip.data import load_own

    values = (images_for((1, 2, 2), 4) // 128 * 0.5).astype(kind)
    for name, array in (("plain", values), ("turned", np.asfortranarray(values))):
        np.savez(tmp_path / f"{name}.npz", images=array, labels=np.arange(4).astype(">i2"))
    found: list[Tensor] = [load_own(tmp_path / f"{name}.npz", (1, 2, 2), 4).images for name in ("plain", "turned")]
    assert all(torch.equal(images, torch.from_numpy(values.astype(np.float32))) for images in found)


# VNN-LIB ---------------------------------------------------------------------------------------------------------------


def question(lower: str, claims: str) -> str:
    names = [f"(declare-const X_{i} Real)" for i in range(5)] + [f"(declare-const Y_{i} Real)" for i in range(3)]
    return "\n".join([*names, *(f"(assert (>= X_{i} {lower}))(assert (<= X_{i} 0.201))" for i in range(5)), claims])


@pytest.mark.parametrize("lower", ["0.2", "2e-1", "+.2", "0.2000", "(- -0.2)", "200E-3"])
def test_numbers_in_other_words_give_the_same_answer(command, tmp_path: Path, lower: str) -> None:
    graph = Graph("n", 5)
    path = written(graph.model(graph.add("Gemm", "x", graph.weight(5, 3))), tmp_path / "net.onnx")
    best = int(ll.load_onnx(path)(torch.full((1, 5), 0.2005, dtype=torch.float64)).argmax())
    other = (best + 1) % 3
    for claim, answer in ((f"(<= Y_{best} Y_{other})", "unsat"), (f"(<= Y_{other} Y_{best})", "sat")):
        (tmp_path / "one.vnnlib").write_text(question(lower, f"(assert {claim})"))
        code, out, said = command("certify", path, "--vnnlib", tmp_path / "one.vnnlib")
        assert (code, out.split()[0]) == (0, answer), said


@pytest.mark.parametrize(
    ("lower", "claims"),
    [
        ("0.2", "(assert (or (and (>= Y_1 Y_0)) (and (>= X_0 0.2))))"),
        ("0.2", "(assert (or (and (>= X_0 0.2)) (and (>= Y_1 Y_0))))"),
        ("0.2", "(assert (or (and (>= Y_1 Y_0) (<= X_0 0.2))))"),
        ("0.2", "(assert (not (>= Y_1 Y_0)))"),
        ("0.2", "(assert (=> (>= X_0 0.2) (>= Y_1 Y_0)))"),
        ("0.2", "(assert (or (or (>= Y_1 Y_0))))"),
        ("0.2", "(assert (>= Y_1 Y_0 Y_2))"),
        ("0.2", "(assert (>= (- Y_1 Y_0) 0))"),
        ("0.2", "(assert (and (>= Y_1 Y_0) (>= Y_2 Y_0)))"),
        ("(- (- 0.2))", "(assert (>= Y_1 Y_0))"),
        ("1/5", "(assert (>= Y_1 Y_0))"),
        ("X_1", "(assert (>= Y_1 Y_0))"),
        ("0.2", "(push 1)(assert (>= Y_1 Y_0))"),
    ],
)
def test_questions_of_other_shapes_are_refused_with_their_line(command, tmp_path: Path, lower: str, claims: str) -> None:
    """What would be a union of boxes, a claim about both ends, or a chain, is never read as something simpler."""
    graph = Graph("n", 5)
    path = written(graph.model(graph.add("Gemm", "x", graph.weight(5, 3))), tmp_path / "net.onnx")
    (tmp_path / "one.vnnlib").write_text(question(lower, claims))
    code, out, said = command("certify", path, "--vnnlib", tmp_path / "one.vnnlib")
    assert (code, out) == (2, "")
    assert "one.vnnlib: line " in said


# The README ------------------------------------------------------------------------------------------------------------


def test_no_command_of_the_readme_writes_rows_that_another_one_has_written() -> None:
    """Who followed it from the top was told that rows.jsonl is there already."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    written_to = [
        line.split("--out ")[1].split()[0]
        for line in readme.splitlines()
        if line.startswith("locallip certify ") and "--out " in line
    ]
    assert len(written_to) > 1
    assert len(set(written_to)) == len(written_to)
