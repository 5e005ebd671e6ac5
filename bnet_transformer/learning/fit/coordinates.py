"""Unconstrained coordinates of the learned parameters, `[coordinate]`, in which the gauge of attention is fixed.

Tables are log ratios to their last probability, weights are in units of the standard deviation of their prior, and a
pair of matrices of attention is replaced by its orbit under rotations of the space between them. The prior density of
the coordinates is the density of the net's prior, normalised: draws of their posterior, mapped back to parameters, are
draws of the posterior of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnet_transformer.data import Batch
from bnet_transformer.learning.fit.identification import FreeBasis, Gauge, find_free_bases, find_gauges, find_unfixed
from bnet_transformer.learning.fit.objective import FitObjective

CHECK_SENTENCES = 16  # the sentences on which the invariance of a gauge is checked
MIN_DIAGONAL = 1e-6  # a smaller diagonal entry of a start is replaced: its logarithm is unbounded


@dataclass(frozen=True)
class GaugeBlock:
    """The coordinates of one pair `W_q, W_k` of `groups` heads: `log diag T`, the entries of T above it, and `Q^T W_k`.

    The same holds for `W_v` and the transpose of `W_o`, and for the two rows of each plane of rotary positions.

    Attributes:
        gauge: The parameters of the pair.
        groups: The number of gauges: one for each head or for each plane of a head, or one for all atoms.
        key_dim: The width of queries and keys: the number of features of one gauge.
        widths: The number of columns of all matrices of the queries of one gauge, and of the keys.
        planes: The number of planes of each head. Default 1.
    """

    # W_q = Q T with orthogonal Q, `[key, key]`, and T upper trapezoidal with a positive diagonal (QR decomposition).
    # For independent entries Normal(0, s^2), Q is uniform and independent of T, T_ii / s ~ chi(key_dim - i + 1) for
    # i = 1.., the entries above the diagonal are Normal(0, s^2) (Bartlett 1933; Muirhead 1982, theorem 3.2.14), and
    # Q^T W_k has the distribution of W_k, because it is invariant under rotations. The likelihood depends on T and
    # Q^T W_k only, so the posterior of Q is uniform. If key_dim exceeds the number of columns of W_q, the last rows of
    # T are 0: neither the likelihood nor T depends on the last rows of Q^T W_k, which stay Normal(0, s^2).

    gauge: Gauge
    groups: int
    key_dim: int
    widths: tuple[int, int]
    planes: int = 1

    @property
    def rank(self) -> int:
        """The number of rows of T that are not 0."""
        return min(self.key_dim, self.widths[0])

    @property
    def has_sign(self) -> bool:
        """True if the last diagonal entry of T is Normal(0, s^2) with a sign: then `Q` is a rotation."""
        # |Normal(0, 1)| has the distribution chi(1). With Q of determinant 1, the last rows of T and of Q^T W_k have a
        # common sign that is free: the density has two equal halves, and it is smooth where the entry is 0.
        return self.rank == self.key_dim

    @property
    def size(self) -> int:
        """The number of coordinates."""
        upper = self.rank * self.widths[0] - self.rank * (self.rank - 1) // 2
        return self.groups * (upper + self.rank * self.widths[1])

    def has_transposed(self, names: tuple[str, ...]) -> bool:
        """Return True for the matrices `W_o`, whose columns are the features of the gauge."""
        return self.gauge.is_output and names == self.gauge.right

    def draw_rotations(self, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
        """Draw an orthogonal matrix for each gauge, `[group, key, key]`; its determinant is 1 for planes."""
        normal = torch.randn(self.groups, self.key_dim, self.key_dim, generator=generator, dtype=dtype)
        Q: Tensor
        Q, R = torch.linalg.qr(normal)
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform on the orthogonal group (Mezzadri 2007)
        if self.gauge.has_planes:
            Q = torch.cat([Q[..., :1], Q[..., 1:] * torch.linalg.det(Q)[:, None, None]], -1)
        return Q

    def split(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split coordinates into `log diag T`, `[group, rank]`, the entries above it, and `Q^T W_k`."""
        rows, m = z.reshape(self.groups, -1), self.rank
        keys = m * self.widths[1]
        return rows[:, :m], rows[:, m : rows.shape[1] - keys], rows[:, rows.shape[1] - keys :].unflatten(1, (m, -1))

    def decode(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Map coordinates to the columns of the queries and of the keys, `[group, key, column]`, with `Q = 1`."""
        diagonal, upper, keys = self.split(z)
        queries = self._build_trapezoid(diagonal, upper, self.widths[0])
        unused = z.new_zeros(self.groups, self.key_dim - self.rank, sum(self.widths))
        queries_unused, keys_unused = unused.split(self.widths, 2)
        return torch.cat([queries, queries_unused], 1), torch.cat([keys, keys_unused], 1)

    def encode(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Map the columns of queries and keys to coordinates."""
        Q, T = torch.linalg.qr(queries, mode="reduced")
        sign = torch.where(T.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(T.dtype)
        if self.gauge.has_planes:  # a reflection changes the model, so the determinant of Q is 1
            sign = torch.cat([sign[:, :1], sign[:, :1] * torch.linalg.det(Q)[:, None].sign()], 1)
        T, keys = sign[..., None] * T, sign[..., None] * (Q.mT @ keys)
        diagonal, logs = T.diagonal(dim1=-2, dim2=-1), self.rank - self.has_sign
        log_diagonal = diagonal[:, :logs].clamp(min=MIN_DIAGONAL).log()
        return torch.cat([log_diagonal, diagonal[:, logs:], get_upper(T), keys.flatten(1)], 1).flatten()

    def straighten(self, z: Tensor) -> Tensor:
        """Map coordinates to those in which the product `A = W_q^T W_k` varies along straight lines."""
        # The likelihood depends on A only: it is constant along a curved ridge of pairs with the same product, on which
        # the prior is wide. With T = S [1 B] and S the first columns of T, A = [1 B]^T C with C = S^T Q^T W_k. In S, B
        # and C the ridge is straight. For a plane of rotary positions, S is a multiple of 1.
        diagonal, upper, keys = self.split(z)
        if self.gauge.has_planes:
            size = diagonal[:, :1].exp()
            parts = [diagonal[:, :1], diagonal[:, 1:] / size, upper / size, (size[..., None] * keys).flatten(1)]
            return torch.cat(parts, 1).flatten()
        T = self._build_trapezoid(diagonal, upper, self.widths[0])
        S = T[..., : self.rank]
        B = torch.linalg.solve_triangular(S, T[..., self.rank :], upper=True)
        return torch.cat([diagonal, get_upper(S), B.flatten(1), (S.mT @ keys).flatten(1)], 1).flatten()

    def bend(self, straight: Tensor) -> tuple[Tensor, Tensor]:
        """Invert `straighten`; also return the log determinant of the derivative of this map."""
        diagonal, entries, products = self.split(straight)
        columns = self.widths[0] - self.rank - self.widths[1]
        if self.gauge.has_planes:
            size = diagonal[:, :1].exp()
            parts = [diagonal[:, :1], diagonal[:, 1:] * size, entries * size, (products / size[..., None]).flatten(1)]
            return torch.cat(parts, 1).flatten(), 2 * (columns + 1) * diagonal[:, :1].sum()
        inside = self.rank * (self.rank - 1) // 2
        S = self._build_trapezoid(diagonal, entries[:, :inside], self.rank)
        T = torch.cat([S, S @ entries[:, inside:].unflatten(1, (self.rank, -1))], 2)
        keys = torch.linalg.solve_triangular(S.mT, products, upper=False)
        log_det = columns * S.diagonal(dim1=-2, dim2=-1).abs().log().sum()
        return torch.cat([diagonal, get_upper(T), keys.flatten(1)], 1).flatten(), log_det

    def _build_trapezoid(self, diagonal: Tensor, upper: Tensor, width: int) -> Tensor:
        """Build T, `[group, rank, width]`, from coordinates of its diagonal and from its entries above."""
        logs, device = self.rank - self.has_sign, diagonal.device
        entries = [diagonal[:, :logs].exp(), diagonal[:, logs:], upper, upper.new_zeros(self.groups, 1)]
        rows, columns = torch.triu_indices(self.rank, width, 1, device=device)
        index = torch.arange(self.rank, device=device)
        position = torch.full((self.rank, width), self.rank + len(rows), device=device)
        position[index, index] = index
        position[rows, columns] = self.rank + torch.arange(len(rows), device=device)
        return torch.cat(entries, 1)[:, position]

    def log_prior(self, z: Tensor) -> Tensor:
        """Compute the log density of the coordinates, for entries of `W_q` and `W_k` that are Normal(0, 1)."""
        # t ~ chi(n) has the density t^(n-1) exp(-t^2/2) / (2^(n/2-1) Gamma(n/2)); that of log t has one factor t more.
        diagonal, upper, keys = self.split(z)
        logs = self.rank - self.has_sign
        log_diagonal = diagonal[:, :logs]
        n = self.key_dim - torch.arange(logs, device=z.device, dtype=z.dtype)
        log_chi = n * log_diagonal - (2 * log_diagonal).exp() / 2 - (n / 2 - 1) * math.log(2) - torch.lgamma(n / 2)
        return log_chi.sum() + _log_normal(diagonal[:, logs:]) + _log_normal(upper) + _log_normal(keys)

    def mirror(self, z: Tensor, group: int) -> Tensor:
        """Change the sign of the last rows of T and of `Q^T W_k` of one group, which changes no density."""
        diagonal, upper, keys = (part.clone() for part in self.split(z))
        rows, _ = torch.triu_indices(self.rank, self.widths[0], 1, device=z.device)
        diagonal[group, -1] *= -1
        upper[group, rows == self.rank - 1] *= -1
        keys[group, -1] *= -1
        return torch.cat([diagonal, upper, keys.flatten(1)], 1).flatten()

    def sample(self, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
        """Draw coordinates from their prior."""
        columns = sum(self.widths)
        joint = torch.randn(self.groups, self.key_dim, columns, generator=generator, dtype=dtype)
        return self.encode(joint[..., : self.widths[0]], joint[..., self.widths[0] :])


class Coordinates:
    """The bijection between coordinates and learned parameters up to the gauge, and the prior of the coordinates.

    Args:
        objective: The log evidence, with the learned parameters and their priors.
        corpus: The sentences on which the invariance of each gauge is checked.

    Attributes:
        size: The number of coordinates.
        unfixed: The attention nodes with learned queries and keys whose gauge is not fixed.
        free_bases: The free bases of hidden vectors, which no coordinates fix.
    """

    def __init__(self, objective: FitObjective, corpus: Batch) -> None:
        self.objective, self.learned = objective, objective.learned
        network = objective.network
        self.dtype, self.device = network.dtype, objective.device
        self.spread = self.learned.spread or 1.0
        self.tables = [*self.learned.tables]
        self.shapes = {name: network.parameters[name].shape for name in self.learned.names}
        self.blocks: list[GaugeBlock] = []
        for gauge in find_gauges(network):
            if {*gauge.names} <= {*self.learned.weights}:
                block = self._create_block(gauge)
                if block is not None and self._is_invariant(block, corpus):
                    self.blocks.append(block)
        in_gauge = {name for block in self.blocks for name in block.gauge.names}
        self.unfixed = find_unfixed(network, {*self.learned.weights} - in_gauge)
        self.free_bases = [
            basis
            for basis in find_free_bases(network, self.learned.weights)
            if not any({*basis.names} <= {*block.gauge.names} for block in self.blocks) and self.is_free(basis, corpus)
        ]
        self.plain = [name for name in self.learned.weights if name not in in_gauge]
        sizes = [
            self.shapes[name].numel() // self.shapes[name][-1] * (self.shapes[name][-1] - 1) for name in self.tables
        ]
        sizes += [self.shapes[name].numel() for name in self.plain] + [block.size for block in self.blocks]
        self.sizes, self.size = sizes, sum(sizes)

    def describe(self, direction: Tensor) -> str:
        """Return the name of the parameter, or pair, with the largest part of a direction, and its row or head."""
        parts = direction.square().split(self.sizes)
        k = max(range(len(parts)), key=lambda k: float(parts[k].sum()))
        name = [*self.tables, *self.plain, *(" and ".join(block.gauge.names) for block in self.blocks)][k]
        if k >= len(self.tables) + len(self.plain):
            rows = self.blocks[k - len(self.tables) - len(self.plain)].groups
        else:
            rows = self.shapes[name][0] if len(self.shapes[name]) > 1 else 1
        row = int(parts[k].reshape(rows, -1).sum(1).argmax())
        return name if rows == 1 else f"{name} [{row}]"

    def decode(self, z: Tensor) -> dict[str, Tensor]:
        """Map coordinates to parameters in which every `Q` is 1, `[coordinate]` to `[*shape]`; tables are logits."""
        parts, result = list(z.split(self.sizes)), {}
        for name in self.tables:
            result[name] = self._decode_table(name, parts.pop(0))
        for name in self.plain:
            result[name] = self.spread * parts.pop(0).reshape(self.shapes[name])
        for block in self.blocks:
            for side, columns in zip((block.gauge.left, block.gauge.right), block.decode(parts.pop(0)), strict=True):
                result |= self._from_columns(side, self.spread * columns, block)
        return {name: result[name] for name in self.learned.names}

    def encode(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Map parameters to their coordinates, `[*shape]` to `[coordinate]`; tables are logits."""
        parts = []
        for name in self.tables:
            logits = parameters[name].log_softmax(-1)
            parts.append((logits[..., :-1] - logits[..., -1:]).flatten())
        parts += [parameters[name].flatten() / self.spread for name in self.plain]
        for block in self.blocks:
            columns = (self._to_columns(side, parameters, block) for side in (block.gauge.left, block.gauge.right))
            parts.append(block.encode(*(value / self.spread for value in columns)))
        return torch.cat(parts)

    def log_prior(self, z: Tensor) -> Tensor:
        """Compute the normalised log density of the prior of the coordinates, `[]`."""
        # |d(p_1..p_(K-1)) / d(log ratios)| = prod_k p_k (Aitchison 1986, section 6.2), so the density of the log ratios
        # of a Dirichlet(a) row is Gamma(sum_k a_k) / prod_k Gamma(a_k) prod_k p_k^a_k.
        parts, total = list(z.split(self.sizes)), z.new_zeros(())
        for name, concentration in self.learned.tables.items():
            logits = self._decode_table(name, parts.pop(0))
            alpha = concentration.to(logits).expand(logits.shape)
            total = total + (alpha * logits).sum() + torch.lgamma(alpha.sum(-1)).sum() - torch.lgamma(alpha).sum()
        for _ in self.plain:
            total = total + _log_normal(parts.pop(0))
        for block in self.blocks:
            total = total + block.log_prior(parts.pop(0))
        return total

    def log_density(self, z: Tensor, corpus: Batch) -> Tensor:
        """Compute the log joint density of coordinates and observations, `[]`."""
        return self.log_prior(z) + self.objective.log_evidence(self.decode(z), corpus).sum()

    def straighten(self, z: Tensor) -> Tensor:
        """Map coordinates to those in which products of matrices vary along straight lines, `[coordinate]`."""
        parts = list(z.split(self.sizes))
        first = len(parts) - len(self.blocks)
        blocks = [block.straighten(part) for block, part in zip(self.blocks, parts[first:], strict=True)]
        return torch.cat([*parts[:first], *blocks])

    def bend(self, straight: Tensor) -> tuple[Tensor, Tensor]:
        """Invert `straighten`; also return the log determinant of the derivative of this map, `[]`."""
        parts, log_det = list(straight.split(self.sizes)), straight.new_zeros(())
        first = len(parts) - len(self.blocks)
        for k, block in enumerate(self.blocks, first):
            parts[k], part = block.bend(parts[k])
            log_det = log_det + part
        return torch.cat(parts), log_det

    def mirrors(self, z: Tensor) -> list[Tensor]:
        """Return the coordinates of equal density that one change of a free sign gives, each `[coordinate]`."""
        parts, result = list(z.split(self.sizes)), []
        for k, block in enumerate(self.blocks, len(parts) - len(self.blocks)):
            for group in range(block.groups if block.has_sign and not block.gauge.has_planes else 0):
                result.append(torch.cat([*parts[:k], block.mirror(parts[k], group), *parts[k + 1 :]]))
        return result

    def sample_prior(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw coordinates from their prior, `[coordinate]`."""
        parts = []
        for name, concentration in self.learned.tables.items():
            gamma = concentration.expand(self.shapes[name])
            # The logarithm of a Gamma(a) variable is that of a Gamma(a + 1) variable plus log(U) / a (Marsaglia and
            # Tsang 2000), which does not underflow for small a.
            uniform = torch.rand(gamma.shape, generator=generator, dtype=torch.float64)
            logs = torch._standard_gamma(gamma + 1, generator=generator).log() + uniform.log() / concentration
            parts.append((logs[..., :-1] - logs[..., -1:]).flatten().to(self.dtype))
        for name in self.plain:
            parts.append(torch.randn(self.shapes[name], generator=generator, dtype=self.dtype).flatten())
        parts += [block.sample(generator, self.dtype) for block in self.blocks]
        return torch.cat(parts).to(self.device)

    def rotate(self, parameters: Mapping[str, Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Rotate parameters that `decode` returned by a random `Q` for each gauge; the model stays the same.

        Rows of the keys that no query reaches are drawn from the prior.
        """
        result = dict(parameters)
        for block in self.blocks:
            Q = block.draw_rotations(generator, self.dtype).to(self.device)
            queries, keys = (self._to_columns(s, parameters, block) for s in (block.gauge.left, block.gauge.right))
            if block.rank < block.key_dim:
                shape = block.groups, block.key_dim - block.rank, block.widths[1]
                unused = self.spread * torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device)
                keys = torch.cat([keys[:, : block.rank], unused], 1)
            result |= self._from_columns(block.gauge.left, Q @ queries, block)
            result |= self._from_columns(block.gauge.right, Q @ keys, block)
        return result

    def to_samples(self, draws: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Map draws `[draw, coordinate]` to samples of the parameters, `[draw, *shape]`, with tables as probabilities.

        The gauge of each draw is random, so the samples are draws of the posterior of the parameters.
        """
        sets = [self.rotate(self.decode(z), generator) for z in draws]
        stacked = {name: torch.stack([values[name] for values in sets]) for name in self.learned.names}
        return {name: value.exp() if name in self.learned.tables else value for name, value in stacked.items()}

    def _create_block(self, gauge: Gauge) -> GaugeBlock | None:
        """Create the coordinates of a gauge; None if it is partial, or a plane of rotary positions has one column."""
        if gauge.is_partial:
            return None
        left, right = (self.shapes[names[0]] for names in (gauge.left, gauge.right))
        shared = gauge.shared if left[: gauge.shared] == right[: gauge.shared] else 0
        planes = left[-2] // 2 if gauge.has_planes else 1
        groups, key_dim = left[:shared].numel() * planes, left[-2] // planes
        widths = [
            sum(self.shapes[name].numel() for name in side) // key_dim // groups for side in (gauge.left, gauge.right)
        ]
        if gauge.has_planes and min(widths) < 2:
            return None
        return GaugeBlock(gauge, groups, key_dim, (widths[0], widths[1]), planes)

    def _decode_table(self, name: str, z: Tensor) -> Tensor:
        """Map the coordinates of a table to its log probabilities, `[*shape]`."""
        shape = self.shapes[name]
        ratios = z.reshape(*shape[:-1], shape[-1] - 1)
        return torch.cat([ratios, ratios.new_zeros(*shape[:-1], 1)], -1).log_softmax(-1)

    def _to_columns(self, names: tuple[str, ...], parameters: Mapping[str, Tensor], block: GaugeBlock) -> Tensor:
        """Arrange matrices `[*heads, key, in]`, and biases `[*heads, key]`, as columns `[group, key, column]`."""
        columns = []
        for number, name in enumerate(names):
            value = parameters[name].unsqueeze(-1) if number else parameters[name]
            value = value.mT if block.has_transposed(names) else value
            value = value.reshape(block.groups // block.planes, -1, *value.shape[-2:])
            columns.append(value.transpose(1, 2).flatten(2))
        joined = torch.cat(columns, 2)
        if block.gauge.has_planes:
            joined = joined.unflatten(1, (block.key_dim, block.planes)).transpose(1, 2).flatten(0, 1)
        return joined

    def _from_columns(self, names: tuple[str, ...], columns: Tensor, block: GaugeBlock) -> dict[str, Tensor]:
        """Split columns into the matrices and biases that `_to_columns` arranged."""
        if block.gauge.has_planes:
            columns = columns.unflatten(0, (-1, block.planes)).transpose(1, 2).flatten(1, 2)
        widths = [self.shapes[name].numel() // block.groups // block.key_dim for name in names]
        result = {}
        for number, (name, part) in enumerate(zip(names, columns.split(widths, 2), strict=True)):
            is_transposed = block.has_transposed(names)
            last = 1 if number else self.shapes[name][-2 if is_transposed else -1]
            value = part.reshape(*part.shape[:2], -1, last).transpose(1, 2)
            result[name] = (value.mT if is_transposed else value).reshape(self.shapes[name])
        return result

    def _is_invariant(self, block: GaugeBlock, corpus: Batch) -> bool:
        """Return True if a random rotation of random matrices leaves the log evidence unchanged."""

        def rotate(values: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
            Q, rotated = block.draw_rotations(generator, self.dtype).to(self.device), dict(values)
            for side in (block.gauge.left, block.gauge.right):
                rotated |= self._from_columns(side, Q @ self._to_columns(side, values, block), block)
            return rotated

        return self._preserves_evidence(block.gauge.names, corpus, rotate)

    def is_free(self, basis: FreeBasis, corpus: Batch) -> bool:
        """Return True if a random rotation of a basis leaves the log evidence of random matrices unchanged."""

        def rotate(values: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
            return basis.rotate(values, basis.draw_rotation(generator, self.dtype).to(self.device))

        return self._preserves_evidence([name for name in basis.names if name in self.learned.weights], corpus, rotate)

    def _preserves_evidence(
        self,
        names: Collection[str],
        corpus: Batch,
        rotate: Callable[[dict[str, Tensor], torch.Generator], dict[str, Tensor]],
    ) -> bool:
        """Return True if a map of the parameters leaves the log evidence unchanged where these are random."""
        # The log evidence is an analytic function of the matrices, so an invariance that holds at random values holds
        # everywhere, with probability 1 (for the structure of these sentences).
        generator = torch.Generator().manual_seed(0)
        part = corpus if self.objective.has_corpus_choice else corpus.take(slice(0, CHECK_SENTENCES))
        store = self.objective.network.parameters
        values = {name: value.detach().to(self.device) for name, value in store.items()}
        for name in names:
            values[name] = torch.randn(self.shapes[name], generator=generator, dtype=self.dtype).to(self.device)
        with torch.no_grad():
            before, after = (self.objective.log_evidence(v, part) for v in (values, rotate(values, generator)))
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        return torch.allclose(before, after, rtol=tolerance, atol=tolerance)


def get_upper(T: Tensor) -> Tensor:
    """Return the entries above the diagonal of matrices, row by row, `[group, row, column]` to `[group, entry]`."""
    rows, columns = torch.triu_indices(T.shape[-2], T.shape[-1], 1, device=T.device)
    return T[:, rows, columns]


def _log_normal(value: Tensor) -> Tensor:
    """Compute the log density of independent standard Normal variables, `[]`."""
    return -value.square().sum() / 2 - value.numel() * math.log(2 * math.pi) / 2
