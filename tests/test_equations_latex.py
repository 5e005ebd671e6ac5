r"""The equations of every TPM, also of user-defined ones, and of every net: LaTeX that compiles and fits a page."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import ClassVar

import pytest

import bnet_transformer as bt
from bnet_transformer.equations import Equations, Notation, render_equation, share_equations
from bnet_transformer.errors import BNetError
from bnet_transformer.tpm import (
    TPM,
    Activation,
    Add,
    Affine,
    Attention,
    Categorical,
    Concat,
    Dot,
    FeedForward,
    Linear,
    Norm,
    Normal,
    Normaliser,
    Parent,
    Pool,
    Positions,
    Read,
    Relative,
    ResNet,
    Score,
    Sinusoid,
    Weight,
)
from bnet_transformer.tpm.symbols import FORMS, Symbols
from tests.cases import CASES, every
from tests.equation_nets import WORD, make_net, mixed, right

# the commands of pdflatex with amsmath and amssymb, MathJax and KaTeX (strict)
PORTABLE_COMMANDS = r"""
    \! \, \; \Big \\ \_ \alpha \bar \begin \beta \cdot \cdots \circ \cos \delta \end \exp \frac \ge \hat \in \infty
    \lambda \ldots \le \left \lfloor \ln \mathbb \mathbf \mathcal \mathrm \max \mid \min \odot \operatorname \overline
    \pi \prod \qquad \quad \rfloor \right \sigma \sim \sin \sqrt \sum \tanh \text \theta \times \top \underbrace
    \widehat \zeta \{ \}
"""
COMMANDS = {*PORTABLE_COMMANDS.split(), r"\ "}


# the TPMs


def test_the_parts_of_attention() -> None:
    bias = bt.Node("b", Weight(3))
    rotary = mixed(Attention(Dot(0.25, rotary=1e6), bias=Relative(1)), bias)
    score = r"0.25 \, (R_i^x x_i^t)^\top R_j^x x_j^t + b_{[j-i]_1}^t"
    assert rf"\exp\left({score}\right)" in right(rotary, "x_(t+1)")
    assert r"i / (10^{6})^{2e/4}" in str(rotary.equations())
    assert r"\operatorname{rot}^x(X^t) \operatorname{rot}^x(X^t)^\top + B^{b^t}" in right(rotary, "x_(t+1)", "row")
    sigmoid = mixed(Attention(normaliser=Normaliser("sigmoid")), reach="causal")
    assert right(sigmoid, "x_(t+1)") == r"\sum_{j \le i} x_j^t \, \operatorname{sigmoid}\left((x_i^t)^\top x_j^t\right)"
    assert r"\left(B^{\mathrm{causal}} \odot \operatorname{sigmoid}" in right(sigmoid, "x_(t+1)", "row")
    unnormalised = mixed(Attention(normaliser=Normaliser("none")))
    assert right(unnormalised, "x_(t+1)", "column") == r"X^t \left((X^t)^\top X^t\right)"


def test_the_word_that_is_read_as_a_node() -> None:
    net = make_net(
        bt.Node("j", Read(), ["x", every("x")], plates=WORD),
        bt.Node("x", Add(), [bt.Arrow("x", "every", pick={"word": "j"})], plates=WORD),
    )
    fraction = r"\frac{e^{(x_i^t)^\top x_{j_i^t}^t}}{\sum_{j' \in \mathcal{S}} e^{(x_i^t)^\top x_{j'}^t}}"
    assert str(net.equations()["j_t"]) == rf"P(j_i^t \mid x_i^t, x_.^t) = {fraction}"
    assert right(net, "x_(t+1)") == "x_{j_i^t}^t"
    assert right(net, "x_(t+1)", "einstein") == "X_{j_i^t,a}^t"


def test_wordwise_steps() -> None:
    def step(tpm: TPM, form: str = "word") -> str:
        return right(make_net(bt.Node("x", tpm, ["x"], plates=WORD)), "x_(t+1)", form)

    assert step(FeedForward(6, "gelu", bias=False)) == r"W_2^{x,t+1} \, \operatorname{GELU}(W_1^{x,t+1} x_i^t)"
    assert step(FeedForward(6, gated=True, bias=False), "einstein") == (
        r"(W_2^{x,t+1})_{ab} \, \left(\operatorname{ReLU}((W_g^{x,t+1})_{bd} X_{id}^t)"
        r"((W_1^{x,t+1})_{be} X_{ie}^t)\right)"
    )
    assert step(Activation("tanh")) == r"\tanh(x_i^t)" and step(Activation("identity"), "row") == "X^t"
    assert step(Norm(bias=False), "row") == r"\operatorname{LayerNorm}(X^t) \, \operatorname{diag}(g^{x,t+1})"
    assert step(ResNet(), "row") == r"X^t + \tanh(X^t (W^{x,t+1})^\top + \mathbf{1} (b^{x,t+1})^\top)"
    assert step(Norm("rms", affine=False)) == r"\frac{x_i^t}{\sqrt{\operatorname{mean}(x_i^t \odot x_i^t) + 10^{-5}}}"
    assert step(Norm(), "column") == (
        r"\operatorname{diag}(g^{x,t+1}) \, \operatorname{LayerNorm}(X^t) + b^{x,t+1} \mathbf{1}^\top"
    )


def test_positions_and_pools() -> None:
    net = make_net(
        bt.Node("s", Sinusoid(4), plates=WORD),
        bt.Node("p", Positions(9, 4), plates=WORD),
        bt.Node("f", Sinusoid(4, first=1), plates=WORD),
        bt.Node("x", Add(), ["x", "s", "p"], plates=WORD),
        epilogue=[bt.Node("m", Pool(), [every("x")]), bt.Node("l", Linear(4), ["m"])],
    )
    assert r"\sin(i / 10000^{e/4}) & e \text{ even}" in right(net, "s_t")
    assert r"\sin((i + 1) / 10000^{e/4}) & e \text{ even}" in right(net, "f_t")
    assert r"count from } 1" in str(net.equations())
    assert right(net, "p_t") == "E_i^{p,t}"
    assert right(net, "x_(t+1)", "row") == r"X^t + S^t + \mathbf{P}^t"
    assert right(net, "m") == r"\frac{1}{n} \sum_{j \in \mathcal{S}} x_j^T"
    assert (
        net.equations("row")["m"].right
        == r"\mathbb{I}\Big(\, \mathrm{m}^\top = \frac{1}{n} \mathbf{1}^\top X^T \,\Big)"
    )
    assert right(net, "l", "row") == r"W^l \, \mathrm{m}"


# user-defined TPMs


@dataclass(frozen=True)
class NoEquation(TPM):
    """A TPM without an equation."""

    slots: ClassVar[tuple[str, ...]] = ("g", "x.")

    def shape(self, *parents: Parent) -> tuple[int, ...]:
        return parents[0].shape


class WordForm(NoEquation):
    """A TPM with an equation of a single word."""

    def latex(self, s: Symbols) -> str:
        return s.equals(rf"{s['g'].T} \, {s.sum('x.')} {s['x.']}")


class EveryForm(NoEquation):
    """A TPM with one equation for all forms."""

    slots: ClassVar[tuple[str, ...]] = ("x",)

    def latex(self, s: Symbols) -> str:
        return s.equals(s.map(s.parameter("W"), s.of("x")) + f" + 2 {s.of('x')}")


@dataclass(frozen=True)
class Additive(Score):
    """A score without an equation."""

    roles: ClassVar[tuple[str, str]] = ("q", "k")

    def check_parents(self, query: Parent, key: Parent, *extra: Parent) -> None: ...

    def score_keys(self, query, keys, i, j, *extra):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    score_queries = score_keys


@pytest.mark.parametrize("form", FORMS)
def test_a_user_defined_tpm_has_every_form(form: str) -> None:
    def get_right_side(tpm: TPM) -> str:
        parents = ["x", every("x")] if len(tpm.get_slots()) == 2 else ["x"]
        return right(make_net(bt.Node("x", tpm, parents, plates=WORD)), "x_(t+1)", form)

    assert get_right_side(NoEquation()) == r"\operatorname{NoEquation}(x_i^t, x_.^t)"
    assert get_right_side(type("Größe_1", (NoEquation,), {})()) == r"\operatorname{Groe\_1}(x_i^t, x_.^t)"
    assert get_right_side(type("猫", (NoEquation,), {})()) == r"\operatorname{f}(x_i^t, x_.^t)"
    assert get_right_side(WordForm()) == r"(x_i^t)^\top \, \sum_{j \in \mathcal{S}} x_j^t"
    assert (
        get_right_side(EveryForm())
        == {
            "word": "W^{x,t+1} x_i^t + 2 x_i^t",
            "row": r"X^t (W^{x,t+1})^\top + 2 X^t",
            "column": "W^{x,t+1} X^t + 2 X^t",
            "einstein": "W_{ab}^{x,t+1} X_{ib}^t + 2 X_{ia}^t",
        }[form]
    )
    assert r"\operatorname{Additive}(x_i^t, x_{j'}^t)" in right(mixed(Attention(Additive())), "x_(t+1)", form)


def test_a_tpm_without_an_equation_is_named_in_an_error() -> None:
    class Wrong(EveryForm):
        def latex(self, s: Symbols) -> str:
            return None  # type: ignore[return-value]

    with pytest.raises(BNetError, match=r"Wrong\.latex: expected LaTeX, a string; got None"):
        make_net(bt.Node("x", Wrong(), ["x"], plates=WORD)).equations()


# names


def test_two_roles_never_share_a_symbol() -> None:
    roles = ["q_cross", "cross_q", "w_q", "hidden_state", *"QqeAaintmTPp"]
    nodes = [bt.Node(role, Affine(4), ["x"], plates=WORD) for role in roles]
    network = make_net(*nodes, bt.Node("x", Add(), roles, plates=WORD)).network
    letters = Notation(network)
    for by_role in (letters.role_letters, letters.matrix_letters):
        shown = [by_role[role] for role in [*roles, "x"]]
        assert len(set(shown)) == len(shown)
    letters_by_role = {role: letters.role_letters[role] for role in ("cross_q", "hidden_state", "i", "w_q")}
    assert letters_by_role == {
        "cross_q": (r"\mathrm{cross\_q}", ()),
        "hidden_state": (r"\mathrm{hidden\_state}", ()),
        "i": (r"\mathrm{i}", ()),
        "w_q": ("w", ("q",)),
    }


@pytest.mark.parametrize("form", FORMS)
def test_labels_and_vocabulary_stay_out(form: str) -> None:
    words = ["50%", "$x$", "a_b", r"\input{/etc/passwd}", "猫", "#1", "x^2~"]
    observe = Categorical(7, labels=tuple(words))
    document = bt.bayesuvius(4, vocabulary=words, observe=observe).equations(form).document()
    assert not [word for word in words if word in document]


# every net, every form


def list_variants() -> list[tuple[str, bt.BNet]]:
    """Return the cases, and the chapter's net with every position of the selector, codebook and mask."""
    result = [(case.name, case.net) for case in CASES]
    real, categorical = Normal(0.3, pool="sum", learnable=True), Categorical(3, pool="mean", affine=False)
    masks = (None, "causal", bt.Reach("window", 1))
    settings = itertools.product(("corpus", "sentence", "slice", "word"), (None, (2, 3, 1)), masks)
    for k, (per, atoms, mask) in enumerate(settings):
        options = {"per": per, "atoms": atoms, "mask": mask, "residual": k % 2 == 0, "observe": None if k % 2 else real}
        result.append((f"{options}", bt.bayesuvius(3, slices=k % 3 + 1, scale=None, **options)))  # type: ignore[arg-type]
    result.append(("logits", bt.bayesuvius(3, observe=categorical)))
    plates = (bt.Plate("head", 2), bt.Plate("group", 3))
    tower = [
        bt.Node("k", Affine(4), ["x"], plates=["head", "group", "word"]),
        bt.Node("mean", Pool(), [bt.Arrow("k", "same")], plates=["group", "word"]),
        bt.Node("x", Concat(mapped=False), ["mean"], plates=WORD, shape=(12,)),
    ]
    return [*result, ("tower", make_net(*tower, plates=plates))]


@pytest.fixture(scope="module")
def forms() -> dict[str, Equations]:
    return {f"{name}, {form}": net.equations(form) for name, net in list_variants() for form in FORMS}


@pytest.mark.slow
def test_braces_balance_and_commands_are_known_everywhere(forms: dict[str, Equations]) -> None:
    for name, equation in forms.items():
        text = re.sub(r"\\[{}]", "", str(equation))
        assert text.count("{") == text.count("}"), name
        assert text.count(r"\left") == text.count(r"\right"), name
        assert set(re.findall(r"\\[A-Za-z]+|\\.", str(equation))) <= COMMANDS, name
        assert equation._repr_latex_().startswith("$$\n\\begin{aligned}")
        assert all(row.note and row.left.startswith("P(") for row in equation)
        assert all(row._repr_latex_() == f"$$\n{row.latex}\n$$" for row in equation)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_mentions_every_parent(form: str) -> None:
    for name, net in list_variants():
        network = net.network
        letters = Notation(network)
        for group in share_equations(network, letters):
            row, _ = render_equation(group, form)
            parents = group.representative.parents
            indices = {k for parent in parents for k in (parent.index, *(selector for _, selector in parent.pick))}
            for role in {network.graph.groups[k].role for k in indices}:
                bases = {letters.role_letters[role][0], letters.matrix_letters[role][0]}
                shown = [rf"(?<![A-Za-z\\]){re.escape(base)}(?![A-Za-z])" for base in bases]
                for side in (row.left.partition("mid")[2], row.right):
                    assert any(re.search(base, side) for base in shown), (name, form, row, role)


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="pdflatex is not installed (apt-get install texlive-latex-base)"
)
def test_everything_compiles_and_fits_the_page(forms: dict[str, Equations], tmp_path) -> None:  # type: ignore[no-untyped-def]
    head, _, tail = bt.bayesuvius(4).equations().document().partition(r"\begin{align*}")
    bodies = [rf"\typeout{{NET {k}}}{equation}\clearpage" for k, equation in enumerate(forms.values())]
    assert tail.endswith("\\end{document}\n")
    (tmp_path / "all.tex").write_text(head + "\n".join(bodies) + "\n\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    parts = re.split(r"NET (\d+)", run.stdout)[1:]
    overfull = [list(forms)[int(k)] for k, log in zip(parts[::2], parts[1::2], strict=True) if "Overfull" in log]
    assert not overfull
