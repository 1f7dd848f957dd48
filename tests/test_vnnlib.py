"""VNN-LIB files: what is read, what is refused with its line, and answers against enumeration."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from locallip.vnnlib import Decider, Spec, WrongSpec, read_spec
from locallip.vnnlib.deciding import inner_box, outer_box
from locallip.vnnlib.spec import parsed
from tests.onnx_graphs import Graph, written

CPU = torch.device("cpu")


def declared(inputs: int, outputs: int) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{i}" for i in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)


def box(ends: list[tuple[object, object]]) -> str:
    return "".join(f"(assert (>= X_{i} {low}))\n(assert (<= X_{i} {high}))\n" for i, (low, high) in enumerate(ends))


def reached(label: int, rivals: list[int]) -> str:
    return "(assert (or " + " ".join(f"(and (>= Y_{rival} Y_{label}))" for rival in rivals) + "))\n"


SMALL = declared(2, 3)
VALID = SMALL + box([(0.1, 0.2), (-1, "3.5e-1")]) + reached(1, [0, 2])
ENDS = (Fraction(1, 10), Fraction(-1)), (Fraction(2, 10), Fraction(35, 100))


# What is read.


def test_the_usual_form() -> None:
    assert parsed(VALID) == Spec(*ENDS, classes=3, label=1, rivals=(0, 2))


@pytest.mark.parametrize(
    "claims",
    [
        "(assert (and (>= X_0 0.1) (<= X_0 0.2) (>= X_1 -1.0) (<= X_1 .35)))",
        "(assert (and (and (<= 0.1 X_0) (>= 0.2 X_0)) (>= X_1 (- 1)) (<= X_1 +35.e-2)))",
        "(assert (>= X_0 0.1)) (assert (<= X_0 2)) (assert (<= X_0 0.2)) (assert (>= X_0 -3)) (assert (and (>= X_1 -1))) "
        "(assert (<= X_1 0.35)) ; the tightest ends count\n",
        "\r\n\t(assert(>= X_0 0.1))(assert(<=\nX_0 0.2));)((\n(assert (>= X_1 -1)) (assert (<= X_1 0.350))",
    ],
)
def test_boxes_in_other_words(claims: str) -> None:
    found = parsed(SMALL + claims + reached(1, [0, 2]))
    assert (found.lower, found.upper) == ENDS


@pytest.mark.parametrize(
    ("claim", "label", "rivals"),
    [
        ("(assert (or (>= Y_0 Y_2) (<= Y_2 Y_1)))", 2, (0, 1)),
        ("(assert (or (and (<= Y_0 Y_1))))", 0, (1,)),
        ("(assert (>= Y_2 Y_0))", 0, (2,)),
        ("(assert (<= Y_0 Y_2))", 0, (2,)),
        ("(assert (and (>= Y_2 Y_0)))", 0, (2,)),
        ("(assert (and (<= X_0 7) (or (>= Y_2 Y_0))))", 0, (2,)),
        ("(assert (or (>= Y_2 Y_0) (>= Y_2 Y_0)))", 0, (2,)),
    ],
)
def test_claims_about_outputs(claim: str, label: int, rivals: tuple[int, ...]) -> None:
    found = parsed(SMALL + box([(0, 1), (0, 1)]) + claim)
    assert (found.label, found.rivals) == (label, rivals)


def test_files_packed_or_not(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.vnnlib", tmp_path / "a.vnnlib.gz"
    plain.write_text(VALID)
    packed.write_bytes(gzip.compress(VALID.encode()))
    assert read_spec(plain) == read_spec(packed) == parsed(VALID)


def test_a_large_file_is_read_in_seconds() -> None:
    count = 3 * 64 * 64
    begin = time.process_time()
    found = parsed(declared(count, 200) + box([(0.25, 0.5)] * count) + reached(0, list(range(1, 200))))
    assert len(found.lower) == count
    assert len(found.rivals) == 199
    assert time.process_time() - begin < 10


# What is refused, with the line and the construct.

GOOD = box([(0, 1), (0, 1)]) + reached(0, [1, 2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no input X_0 is declared"),
        ("; nothing but words", "no input X_0 is declared"),
        ("(declare-const X_0 Real)", "no output Y_0 is declared"),
        (SMALL, "X_0 has no lower end"),
        (SMALL + "(assert (>= X_0 0)) (assert (>= X_1 0))", "X_0 has no upper end"),
        (SMALL + box([(0, 1)]) + reached(0, [1]), "X_1 has no lower end"),
        (SMALL + box([(0, 1), (0, 1)]), "nothing is asked"),
        (
            SMALL + box([(0, 1), (0.5, 0.4)]) + reached(0, [1]),
            "line 9: X_1 has its lower end 0.5 (line 8) above the upper end",
        ),
        (SMALL + GOOD + reached(0, [1]), "line 11: a second assertion about outputs, besides that of line 10"),
        (SMALL + "(declare-const X_1 Real)", "line 6: X_1 is declared twice"),
        ("(declare-const X_1 Real)(declare-const Y_0 Real)", "X_0 is not declared, and X_1 is"),
        ("(declare-const X_01 Real)", "line 1: '(declare-const X_01 Real)' is not understood"),
        ("(declare-const Z_0 Real)", "expected (declare-const X_0 Real)"),
        ("(declare-const X_0 Int)", "expected (declare-const X_0 Real)"),
        ("(declare-const X_0)", "expected (declare-const X_0 Real)"),
        ("(declare-const (X_0) Real)", "is not understood"),
        ("(declare-fun X_0 () Real)", "'(declare-fun X_0 () Real)' is not understood"),
        ("(vnnlib-version <2.0>)", "'(vnnlib-version <2.0>)' is not understood"),
        ("(set-logic QF_LRA)", "'(set-logic QF_LRA)' is not understood"),
        ("()", "line 1: '()' is not understood"),
        ("(())", "is not understood"),
        ("((assert) (<= X_0 1))", "is not understood"),
        (SMALL + "(assert)", "line 6: '(assert)' is not understood"),
        (SMALL + "(assert X_0)", "is not understood"),
        (SMALL + "(assert (<= X_0 1) (<= X_1 1))", "is not understood"),
        (SMALL + "(assert (< X_0 1))", "line 6: '(< X_0 1)' is not understood: expected <= or >="),
        (SMALL + "(assert (= X_0 1))", "expected <= or >="),
        (SMALL + "(assert (<= 0 X_0 1))", "expected <= or >="),
        (SMALL + "(assert (<= X_0))", "expected <= or >="),
        (SMALL + "(assert (<= 0 1))", "it names no input X_0 and no output Y_0"),
        (SMALL + "(assert (or))", "it names no input"),
        (SMALL + "(assert (<= X_0 X_1))", "'X_0' is no number"),
        (SMALL + "(assert (<= X_0 Y_1))", "expected a comparison of an input such as X_0 and a number"),
        (SMALL + "(assert (<= (+ X_0 X_1) 1))", "line 6: '(<= (+ X_0 X_1) 1)' is not understood"),
        (SMALL + "(assert (<= X_7 1))", "line 6: X_7 is not declared"),
        (SMALL + "(assert (or (<= X_0 1) (<= X_1 1)))", "'(or (<= X_0 1) (<= X_1 1))' is not understood"),
        (SMALL + "(assert (not (<= X_0 1)))", "is not understood"),
        (SMALL + "(assert (and (<= X_0 1) X_1))", "expected comparisons in (and ...)"),
        (SMALL + "(assert (>= Y_0 3.5))", "expected a comparison of two outputs"),
        (SMALL + "(assert (>= 3.5 Y_0))", "expected a comparison of two outputs"),
        (SMALL + "(assert (>= Y_0 Y_0))", "compares an output with itself"),
        (SMALL + "(assert (>= Y_0 Y_9))", "line 6: Y_9 is not declared"),
        (SMALL + "(assert (>= Y_0 (+ Y_1 1)))", "is not understood"),
        (SMALL + "(assert (and (>= Y_0 Y_1) (>= Y_2 Y_1)))", "several comparisons of outputs that hold together"),
        (SMALL + "(assert (or (and (>= Y_0 Y_1) (>= Y_2 Y_1))))", "several comparisons of outputs that hold together"),
        (SMALL + "(assert (or (or (>= Y_0 Y_1))))", "is not understood"),
        (SMALL + "(assert (or Y_0 (>= Y_0 Y_1)))", "expected comparisons of outputs"),
        (SMALL + "(assert (or (and) (>= Y_0 Y_1)))", "is not understood"),
        (SMALL + box([(0, 1), (0, 1)]) + "(assert (or (>= Y_0 Y_1) (>= Y_0 Y_2)))", "compared with Y_1 and with Y_2"),
        ("(assert", "line 1: the statement that begins here has no end"),
        (SMALL + "\n\n(assert (<= X_0 1)", "line 8: the statement that begins here has no end"),
        (SMALL + ")", "line 6: ')' stands outside of all statements"),
        (SMALL + "X_0", "line 6: 'X_0' stands outside of all statements"),
        ('(echo "words")', 'line 1: " is not understood'),
        ("(declare-const |X_0| Real)", "line 1: | is not understood"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(WrongSpec, match=re.escape(message)) as caught:
        parsed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        *(
            (word, "is no number")
            for word in ("NaN", "nan", "inf", "-inf", "infinity", "oo", "1/3", "0x10", "1_000", "1e", ".")
        ),
        *((word, "is no number") for word in ("--1", "1.2.3", "e5", "1e+", "٣", "²", "1f", "(- X_0)", "(- 1 2)", "(/ 1 3)")),
        *((word, "beyond what float64 can hold") for word in ("1e400", "-1e400", "1e5000", "2e308", "1" + "0" * 400)),
        *((word, "beyond what float64 can hold") for word in ("1e999999999", "1e-999999999", "1e" + "9" * 500)),
        ("1" * 2000, "is no number"),
        ("0." + "1" * 2000, "is no number"),
        ("(- (- 1))", "is no number"),
        ("__import__('os')", "is not understood"),
    ],
)
def test_numbers_that_are_none_or_too_large(number: str, message: str) -> None:
    begin = time.process_time()
    with pytest.raises(WrongSpec, match=message) as caught:
        parsed(SMALL + f"(assert (<= X_0 {number}))")
    assert "line 6" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("number", ["1e-400", "5e-324", "1e308", "-0", "0.1" + "0" * 900, "123456789.123456789e-12"])
def test_numbers_that_are_large_or_small_are_exact(number: str) -> None:
    found = parsed(
        SMALL
        + f"(assert (<= X_0 {number})) (assert (>= X_0 -1e300))"
        + box([(0, 1)]).replace("X_0", "X_1")
        + reached(0, [1])
    )
    assert found.upper[0] == Fraction(number)


def test_nesting_without_end_is_refused_and_does_not_recur() -> None:
    for text in ("(" * 10**6, "(assert " * 10**5, "(assert (and " * 40 + "(<= X_0 1)" + "))" * 40):
        with pytest.raises(WrongSpec, match="line 1: nested more than 16 deep"):
            parsed(text)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "absent.vnnlib": (None, "cannot read"),
        "cut.vnnlib.gz": (gzip.compress(VALID.encode())[:-9], "no whole gzip file"),
        "plain.vnnlib.gz": (VALID.encode(), "no whole gzip file"),
        "damaged.vnnlib.gz": (gzip.compress(VALID.encode())[:12] + b"\xff" * 40, "no whole gzip file"),
        "bytes.vnnlib": (b"\xff\xfe(assert", "is not text"),
    }
    for name, (data, message) in bad.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(WrongSpec, match=message):
            read_spec(tmp_path / name)
    with pytest.raises(WrongSpec, match="cannot read"):
        read_spec(tmp_path)
    monkeypatch.setattr("locallip.vnnlib.expressions.MOST_BYTES", 10_000)
    (tmp_path / "bomb.vnnlib.gz").write_bytes(gzip.compress(b";" * 10_000_000))
    with pytest.raises(WrongSpec, match="more than 10,000 bytes"):
        read_spec(tmp_path / "bomb.vnnlib.gz")


def test_messages_hold_nothing_that_a_terminal_obeys() -> None:
    with pytest.raises(WrongSpec) as caught:
        parsed("(declare-const \x1b[2JX_0 Real)")
    assert "\x1b" not in str(caught.value)


@given(st.text(alphabet="()XY_01 <=>.-;\nassertandordeclare-constReal", max_size=200))
@settings(max_examples=200)
def test_any_text_is_read_or_refused(text: str) -> None:
    for before in ("", VALID):
        try:
            found = parsed(before + text)
        except WrongSpec:
            continue
        assert isinstance(found, Spec)


# Boxes.


@given(st.lists(st.tuples(st.fractions(-5, 5), st.fractions(0, 1)), min_size=1, max_size=5))
def test_boxes_are_rounded_outward_for_proofs_and_inward_for_points(ends: list[tuple[Fraction, Fraction]]) -> None:
    lower, upper = tuple(low for low, _ in ends), tuple(low + width for low, width in ends)
    spec = Spec(lower, upper, 2, 0, (1,))
    (low, high), (bottom, top) = outer_box(spec), inner_box(spec)
    for i in range(len(ends)):
        assert Fraction(low[i]) <= lower[i] <= upper[i] <= Fraction(high[i])
        assert high[i] - low[i] <= float(upper[i] - lower[i]) + 4e-15
        if lower[i] < upper[i] - Fraction(1, 10**12):
            assert lower[i] <= Fraction(bottom[i]) <= Fraction(top[i]) <= upper[i]
        assert low[i] <= bottom[i] <= top[i] <= high[i]


# Answers.


def network(inputs: int = 3, classes: int = 3, hidden: int = 8, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def asked(x: Tensor, half: list[float], label: int, rivals: list[int], classes: int) -> Spec:
    ends = [(Decimal(v - h), Decimal(v + h)) for v, h in zip(x.tolist(), half, strict=True)]
    return parsed(declared(len(ends), classes) + box(ends) + reached(label, rivals))


def grid(spec: Spec, steps: int) -> Tensor:
    axes = [
        torch.linspace(float(a), float(b), steps, dtype=torch.float64) for a, b in zip(spec.lower, spec.upper, strict=True)
    ]
    return torch.cartesian_prod(*axes)


@pytest.mark.parametrize("guarantee", ["deterministic", "high_probability"])
@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    label=st.integers(0, 2),
    rivals=st.sampled_from([None, 1]),
)
@settings(max_examples=25, derandomize=True)
def test_answers_are_those_of_enumeration(guarantee: str, seed: int, size: float, label: int, rivals: int | None) -> None:
    """unsat: no point of a fine grid lets a rival reach the label; sat: the point is in the box, and one does."""
    model = network(seed=seed)
    x = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    others = [i for i in range(3) if i != label]
    spec = asked(x, [size, size / 2, size / 4], label, others if rivals is None else others[:rivals], 3)
    found = Decider(model, (3,), 3, CPU, guarantee=guarantee, seed=0)(spec, attack_steps=20, seed=1)
    double = network(seed=seed).double()
    double.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = double(grid(spec, 9))
    lead = (logits[:, [spec.label]] - logits[:, list(spec.rivals)]).amin(1)
    if found.result == "unsat":
        assert float(lead.min()) > 0
        assert found.margin is not None
        assert 0 < found.margin <= float(lead.min()) + 1e-12
    if float(lead.min()) < 0:
        assert found.result == "sat"  # such small networks are no riddle to the attack
    if found.result == "sat":
        assert found.point is not None
        point = torch.tensor(found.point, dtype=torch.float64)
        assert all(a <= Fraction(v) <= b for a, v, b in zip(spec.lower, found.point, spec.upper, strict=True))
        with torch.no_grad():
            outputs = double(point)
        assert max(outputs[list(spec.rivals)]) > outputs[spec.label]
        assert found.outputs == pytest.approx(outputs.tolist(), abs=1e-12)
    else:
        assert found.point is None


def test_linear_networks_are_decided_to_the_last_digits() -> None:
    """The exact half width at which the corner that matters ties, from fractions: just below unsat, just above sat."""
    model = nn.Linear(4, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.0]]))
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    decider = Decider(model, (4,), 2, CPU, guarantee="deterministic")
    tie = Fraction(1) / Fraction(15, 4)
    for share, expected in ((Fraction(999_999, 10**6), "unsat"), (Fraction(1_000_001, 10**6), "sat")):
        half = tie * share
        spec = Spec((-half,) * 4, (half,) * 4, 2, 0, (1,))
        found = decider(spec, attack_steps=30, seed=0)
        assert found.result == expected
    assert decider(Spec((-2 * tie,) * 4, (Fraction(0),) * 4, 2, 1, (0,)), attack_steps=30, seed=0).result == "sat"


def test_half_widths_that_differ_and_inputs_that_are_fixed() -> None:
    """The answer is about this box, not about a cube around it: the third input alone would break the label."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 0.1, 100.0], [0.0, 0.0, 0.0]]))
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    decider = Decider(model, (3,), 2, CPU, guarantee="deterministic")
    fixed = parsed(declared(3, 2) + box([(-4, 4), (-4, 4), ("0.1", "0.1")]) + reached(0, [1]))
    assert decider(fixed, attack_steps=20, seed=0).result == "unsat"
    wider = parsed(declared(3, 2) + box([(-4, 4), (-4, 4), ("-0.1", "0.1")]) + reached(0, [1]))
    found = decider(wider, attack_steps=20, seed=0)
    assert found.result == "sat"
    assert found.point is not None
    assert abs(found.point[2]) <= 0.1


def test_ties_and_overflow_are_unknown() -> None:
    model = nn.Linear(1, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [1.0]]))
        model.bias.zero_()
    decider = Decider(model, (1,), 2, CPU, guarantee="deterministic")
    assert decider(parsed(declared(1, 2) + box([(0, 1)]) + reached(0, [1])), attack_steps=5, seed=0).result == "unknown"
    with torch.no_grad():
        model.bias[0] = 1.0
        model.weight[1] = 1e300
    huge = Decider(model, (1,), 2, CPU, guarantee="deterministic")
    spec = parsed(declared(1, 2) + box([("-1e308", "1e308")]) + reached(0, [1]))
    assert huge(spec, attack_steps=5, seed=0).result in ("unknown", "sat")


def test_one_rival_of_many_is_decided_apart_from_the_others() -> None:
    """Another class is ahead everywhere, which is not asked."""
    model = network(classes=4)
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([5.0, 0.0, 10.0, 0.0]))
    x = torch.rand(3)
    decider = Decider(model, (3,), 4, CPU, guarantee="deterministic")
    assert decider(asked(x, [0.1] * 3, 0, [1, 3], 4), attack_steps=10, seed=0).result == "unsat"
    assert decider(asked(x, [0.1] * 3, 0, [1, 2, 3], 4), attack_steps=10, seed=0).result == "sat"
    assert decider(asked(x, [0.1] * 3, 0, [2], 4), attack_steps=0, seed=0).by == "middle of the box"


def test_branch_and_bound_decides_what_whole_boxes_leave_open() -> None:
    found = []
    for seconds in (0.0, 1.0):
        decider = Decider(network(hidden=16, seed=4), (3,), 3, CPU, guarantee="deterministic", branch_seconds=seconds)
        x = torch.full((3,), 0.5)
        label = int(decider.model(x).argmax())
        others = [i for i in range(3) if i != label]
        for half in (0.5, 0.7, 0.9, 1.1, 1.3):
            found.append(decider(asked(x, [half] * 3, label, others, 3), attack_steps=30, seed=0).result)
    without, with_branches = found[:5], found[5:]
    assert all(a == b or a == "unknown" for a, b in zip(without, with_branches, strict=True))
    assert with_branches.count("unknown") <= without.count("unknown")


@pytest.mark.parametrize(
    ("inputs", "classes", "message"),
    [(4, 3, "it has 4 inputs, and the network 3"), (3, 4, "it has 4 outputs, and the network 3")],
)
def test_questions_about_another_network_are_refused(inputs: int, classes: int, message: str) -> None:
    spec = parsed(declared(inputs, classes) + box([(0, 1)] * inputs) + reached(0, [1]))
    with pytest.raises(WrongSpec, match=message):
        Decider(network(), (3,), 3, CPU)(spec, attack_steps=1, seed=0)


# The command.


@pytest.fixture(scope="module")
def network_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = Graph(1, 1, 4, 4)
    z = graph.add("Relu", graph.add("Conv", "x", graph.weight(3, 1, 3, 3), graph.weight(3)))
    return written(graph.head(z), tmp_path_factory.mktemp("network") / "net.onnx")


def spec_file(folder: Path, name: str, half: float, label: int) -> Path:
    ends = [(repr(0.5 - half), repr(0.5 + half))] * 16
    path = folder / name
    text = declared(16, 3) + box(ends) + reached(label, [i for i in range(3) if i != label])
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def label_of(command, network_file: Path, folder: Path) -> int:
    """The class at the middle, found by asking."""
    files = [spec_file(folder, f"{label}.vnnlib", 1e-6, label) for label in range(3)]
    code, out, _ = command("certify", network_file, "--vnnlib", *files, "--json", "--seed", 0)
    assert code == 0
    results = [each["result"] for each in json.loads(out)["answers"]]
    assert sorted(results) == ["sat", "sat", "unsat"]
    return results.index("unsat")


def test_the_command_in_the_words_of_the_competition(command, network_file: Path, tmp_path: Path) -> None:
    label = label_of(command, network_file, tmp_path)
    near, far = spec_file(tmp_path, "near.vnnlib.gz", 0.01, label), spec_file(tmp_path, "far.vnnlib", 30.0, label)
    code, out, _ = command("certify", network_file, "--vnnlib", near, far, "--guarantee", "deterministic")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "unsat"
    assert lines[1].startswith("; near.vnnlib.gz: by ")
    assert "guarantee deterministic" in lines[1]
    assert lines[2] == "sat"
    witness = dict(re.findall(r"\((X_\d+|Y_\d+) ([-+.\deE]+)\)", out))
    assert len(witness) == 19
    x = torch.tensor([float(witness[f"X_{i}"]) for i in range(16)], dtype=torch.float64)
    assert bool(((x >= -29.5) & (x <= 30.5)).all())
    from locallip import load_onnx

    with torch.no_grad():
        outputs = load_onnx(network_file).double()(x.reshape(1, 1, 4, 4))[0]
    assert int(outputs.argmax()) != label
    assert [float(witness[f"Y_{i}"]) for i in range(3)] == pytest.approx(outputs.tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eps", "0.1"], "--eps does not go with --vnnlib"),
        (["--data", "images.npz"], "--data does not go with --vnnlib"),
        (["--out", "rows.jsonl"], "--out does not go with --vnnlib"),
        (["--limit", "3"], "--limit does not go with --vnnlib"),
        (["--radius"], "--radius does not go with --vnnlib"),
        (["--guarantee", "estimate"], "--guarantee estimate proves nothing"),
    ],
)
def test_options_that_make_no_sense_beside_it(command, network_file: Path, tmp_path: Path, options, message) -> None:
    path = spec_file(tmp_path, "a.vnnlib", 0.1, 0)
    code, _, err = command("certify", network_file, *options, "--vnnlib", path)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_wrong_files_are_told_in_a_line_before_anything_is_decided(command, network_file: Path, tmp_path: Path) -> None:
    good, bad, other = spec_file(tmp_path, "a.vnnlib", 0.01, 0), tmp_path / "b.vnnlib", tmp_path / "c.vnnlib"
    bad.write_text(VALID + "(assert (< X_0 1))")
    other.write_text(VALID)
    for path, message in ((bad, "b.vnnlib: line 11: '(< X_0 1)' is not understood"), (other, "c.vnnlib: it has 2 inputs")):
        code, out, err = command("certify", network_file, "--vnnlib", good, path)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    code, _, err = command("certify", network_file, "--vnnlib", tmp_path / "absent.vnnlib")
    assert code == 2
    assert "cannot read" in err


def test_corners_of_a_box_are_reached_by_its_points() -> None:
    """The box that certificates are about holds all corners of the file's box, in fractions."""
    spec = parsed(declared(2, 2) + box([("0.1", "0.3"), ("-0.7", "1e-30")]) + reached(0, [1]))
    (low, high) = outer_box(spec)
    for corner in itertools.product(*zip(spec.lower, spec.upper, strict=True)):
        assert all(Fraction(a) <= v <= Fraction(b) for a, v, b in zip(low, corner, high, strict=True))
    assert all(math.isfinite(v) for v in (*low, *high))
