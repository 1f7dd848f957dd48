"""What a VNN-LIB file asks: is there an input in a box for which one of some classes reaches another?

Understood is what robustness of a classifier needs, of the older format of the competition VNN-COMP (up to 2024):

    (declare-const X_0 Real)                                        every input and output of the network
    (assert (>= X_0 0.1)) (assert (<= X_0 0.2))                     both ends of every input, also joined by `and`
    (assert (or (and (>= Y_1 Y_0)) (and (>= Y_2 Y_0)) ...))         once: classes that reach the class Y_0
    (assert (>= Y_1 Y_0))                                           the same for a single class

"unsat" then means that Y_0 stays ahead of these classes everywhere in the box. All else is refused with its line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from locallip.vnnlib.expressions import Group, Word, WrongSpec, content, quoted, statements

_NAME = re.compile(r"([XY])_(0|[1-9][0-9]{0,8})")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE]([+-]?[0-9]+))?")
#: Numbers beyond these would fill the memory as fractions: 1e999999999 has a billion digits.
LONGEST, LARGEST_EXPONENT = 1000, 5000
_LARGEST = Fraction(sys.float_info.max)
_TURNED = {"<=": ">=", ">=": "<="}


@dataclass(frozen=True)
class Spec:
    """lower and upper are the exact ends of the inputs, in the order of the flattened input; `classes` is their number.

    Asked is whether an input in the box lets one of `rivals` reach `label` or pass it.
    """

    lower: tuple[Fraction, ...]
    upper: tuple[Fraction, ...]
    classes: int
    label: int
    rivals: tuple[int, ...]


def read_spec(path: Path) -> Spec:
    """The question in a file, which may be packed with gzip; refused with a line number where it is not understood."""
    text = content(path)
    try:
        return parsed(text)
    except WrongSpec as error:
        raise WrongSpec(f"{path}: {error}") from None


def parsed(text: str) -> Spec:
    reader = _Reader()
    for statement in statements(text):
        reader.read(statement)
    return reader.spec()


@dataclass
class _End:
    """An end of an input and the line that says it."""

    value: Fraction
    line: int


@dataclass
class _Reader:
    """What is known so far: the declared names by kind, the ends of inputs, and the pairs (rival, label) of the outputs."""

    declared: dict[str, set[int]] = field(default_factory=lambda: {"X": set(), "Y": set()})
    lower: dict[int, _End] = field(default_factory=dict)
    upper: dict[int, _End] = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    asked: int = 0  # the line of the assertion about outputs

    def read(self, statement: Group) -> None:
        if statement.head == "declare-const":
            self._declare(statement)
        elif statement.head == "assert" and len(statement.parts) == 2 and isinstance(statement.parts[1], Group):
            self._assert(statement.parts[1])
        else:
            raise _unknown(statement, "expected (declare-const X_0 Real) or (assert ...)")

    def _declare(self, statement: Group) -> None:
        parts = [str(part) for part in statement.parts]
        name = _NAME.fullmatch(parts[1]) if len(parts) == 3 else None
        if name is None or parts[2] != "Real" or not isinstance(statement.parts[1], Word):
            raise _unknown(statement, "expected (declare-const X_0 Real), with X for inputs and Y for outputs")
        kind, index = name[1], int(name[2])
        if index in self.declared[kind]:
            raise WrongSpec(f"line {statement.line}: {name[0]} is declared twice")
        self.declared[kind].add(index)

    def _assert(self, claim: Group) -> None:
        if claim.head == "and" and len(claim.parts) > 1 and self._kind_of(claim) == "X":
            for part in claim.parts[1:]:
                if not isinstance(part, Group):
                    raise _unknown(claim, "expected comparisons in (and ...)")
                self._assert(part)
        elif self._kind_of(claim) == "X":
            self._end(claim)
        else:
            if self.asked:
                raise WrongSpec(
                    f"line {claim.line}: a second assertion about outputs, besides that of line {self.asked}, is not "
                    "understood: join classes with (or ...)"
                )
            self.asked, self.pairs = claim.line, [self._pair(part) for part in _alternatives(claim)]

    def _kind_of(self, claim: Group) -> str:
        """Of what the first name in a claim is, X or Y; the claim is refused where it has none."""
        left: list[Word | Group] = [claim]
        while left:
            part = left.pop()
            if isinstance(part, Group):
                left += reversed(part.parts)
            elif _NAME.fullmatch(part.text):
                return part.text[0]
        raise _unknown(claim, "it names no input X_0 and no output Y_0")

    def _end(self, claim: Group) -> None:
        """A comparison of an input and a number."""
        operator, left, right = _comparison(claim)
        if isinstance(right, Word) and _NAME.fullmatch(right.text):
            operator, left, right = _TURNED[operator], right, left
        index, value = self._index(left, "X", claim), _number(right, claim)
        ends, tighter = (self.upper, min) if operator == "<=" else (self.lower, max)
        known = ends.get(index)
        if known is None or tighter(value, known.value) != known.value:
            ends[index] = _End(value, claim.line)

    def _pair(self, claim: Group) -> tuple[int, int]:
        """The rival and the label of a comparison of outputs: rival >= label."""
        operator, left, right = _comparison(claim)
        if operator == "<=":
            left, right = right, left
        rival, label = self._index(left, "Y", claim), self._index(right, "Y", claim)
        if rival == label:
            raise WrongSpec(f"line {claim.line}: {quoted(claim)} compares an output with itself")
        return rival, label

    def _index(self, part: Word | Group, kind: str, claim: Group) -> int:
        name = _NAME.fullmatch(part.text) if isinstance(part, Word) else None
        if name is None or name[1] != kind:
            wanted = "an input such as X_0 and a number" if kind == "X" else "two outputs such as Y_1 and Y_0"
            raise _unknown(claim, f"expected a comparison of {wanted}")
        if int(name[2]) not in self.declared[kind]:
            raise WrongSpec(f"line {claim.line}: {name[0]} is not declared")
        return int(name[2])

    def spec(self) -> Spec:
        """The whole, once all has been read."""
        inputs, classes = (self._count(kind) for kind in "XY")
        for ends, word in ((self.lower, "lower"), (self.upper, "upper")):
            missing = [i for i in range(inputs) if i not in ends]
            if missing:
                raise WrongSpec(f"X_{missing[0]} has no {word} end: every input needs (<= X_0 ...) and (>= X_0 ...)")
        for i in range(inputs):
            low, high = self.lower[i], self.upper[i]
            if low.value > high.value:
                raise WrongSpec(
                    f"line {max(low.line, high.line)}: X_{i} has its lower end {float(low.value):.9g} (line {low.line}) "
                    f"above the upper end {float(high.value):.9g} (line {high.line}): there is no such input"
                )
        labels = sorted({label for _, label in self.pairs})
        if not labels:
            raise WrongSpec("no assertion is about the outputs: nothing is asked")
        if len(labels) > 1:
            raise WrongSpec(
                f"line {self.asked}: outputs are compared with Y_{labels[0]} and with Y_{labels[1]}; only one class that "
                "others reach is understood"
            )
        rivals = tuple(sorted({rival for rival, _ in self.pairs}))
        lower, upper = (tuple(ends[i].value for i in range(inputs)) for ends in (self.lower, self.upper))
        return Spec(lower, upper, classes, labels[0], rivals)

    def _count(self, kind: str) -> int:
        """How many names of a kind there are, from 0 without a gap."""
        found = self.declared[kind]
        if not found:
            raise WrongSpec(f"no {'input X_0' if kind == 'X' else 'output Y_0'} is declared")
        gap = next((i for i in range(len(found)) if i not in found), None)
        if gap is not None:
            raise WrongSpec(f"{kind}_{gap} is not declared, and {kind}_{max(found)} is")
        return len(found)


def _alternatives(claim: Group) -> Iterator[Group]:
    """The comparisons of an assertion about outputs, one of which is asked for."""
    if claim.head == "or" and len(claim.parts) > 1:
        for part in claim.parts[1:]:
            yield _single(part, claim)
    else:
        yield _single(claim, claim)


def _single(part: Word | Group, claim: Group) -> Group:
    """A comparison, or the only one in an `and`."""
    if isinstance(part, Group) and part.head == "and":
        if len(part.parts) > 2:
            raise _unknown(part, "several comparisons of outputs that hold together are not understood")
        part = part.parts[1] if len(part.parts) == 2 else part
    if not isinstance(part, Group):
        raise _unknown(claim, "expected comparisons of outputs")
    return part


def _comparison(claim: Group) -> tuple[str, Word | Group, Word | Group]:
    if claim.head not in _TURNED or len(claim.parts) != 3:
        raise _unknown(claim, "expected <= or >= of two values")
    return claim.head, claim.parts[1], claim.parts[2]


def _number(part: Word | Group, claim: Group) -> Fraction:
    """The exact number that is written, one between the largest numbers of float64 of either sign."""
    if isinstance(part, Group) and part.head == "-" and len(part.parts) == 2 and isinstance(part.parts[1], Word):
        return -_number(part.parts[1], claim)  # SMT-LIB writes negative numbers so
    found = _NUMBER.fullmatch(part.text) if isinstance(part, Word) and len(part.text) <= LONGEST else None
    if found is None:
        raise _unknown(claim, f"{quoted(part)} is no number")
    if found[3] and (len(found[3]) > 9 or abs(int(found[3])) > LARGEST_EXPONENT):
        raise WrongSpec(f"line {claim.line}: {quoted(part)} is beyond what float64 can hold")
    value = Fraction(found[0])
    if abs(value) > _LARGEST:  # rounded outward, a little more would be infinite
        raise WrongSpec(f"line {claim.line}: {quoted(part)} is beyond what float64 can hold")
    return value


def _unknown(what: Group, wanted: str) -> WrongSpec:
    return WrongSpec(f"line {what.line}: {quoted(what)} is not understood: {wanted}")
