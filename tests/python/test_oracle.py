"""The oracle against central finite differences, a row-by-row formulation and the identities of the definition."""

import ml_dtypes
import numpy as np
import oracle
import pytest

PROBLEMS = [  # n_q, n_k, block, topk, Hq, Hkv, Hi, Hik, D, Dv, Di
    (40, 40, 8, 3, 8, 2, 2, 1, 8, 8, 8),
    (45, 61, 8, 3, 8, 1, 2, 2, 8, 5, 6),
    (30, 64, 16, 2, 6, 3, 3, 1, 5, 7, 7),
    (33, 20, 4, 16, 16, 1, 1, 1, 8, 8, 8),
    (20, 96, 16, 4, 4, 4, 4, 4, 16, 16, 16),
]


class Problem:
    def __init__(self, numbers, seed=0):
        g = np.random.default_rng(seed)
        n_q, n_k, self.block, self.topk, hq, hkv, self.heads, hik, d, dv, di = numbers
        self.q, self.d_out = g.standard_normal((n_q, hq, d)), g.standard_normal((n_q, hq, dv))
        self.k, self.v = g.standard_normal((n_k, hkv, d)), g.standard_normal((n_k, hkv, dv))
        self.index_q, self.index_k = g.standard_normal((n_q, self.heads, di)), g.standard_normal((n_k, hik, di))
        self.scale, self.index_scale = d**-0.5, di**-0.5
        # Two sequences of unequal lengths.
        a, b = n_q // 3, n_k // 2
        self.sequences = [(0, a, np.arange(b)), (a, n_q - a, np.arange(b, n_k))]
        self.indices, self.lse = oracle.select(
            self.index_q, self.index_k, self.sequences, topk=self.topk, block_size=self.block, init_blocks=0,
            local_blocks=1, scale=self.index_scale,
        )  # fmt: skip

    def attend(self, indices=None):
        indices = self.indices if indices is None else indices
        return oracle.attend(self.q, self.k, self.v, indices, self.heads, self.sequences, self.block, self.scale)

    def backward(self, d_kl):
        index = (self.index_q, self.index_k, self.index_scale)
        return oracle.backward(
            self.q,
            self.k,
            self.v,
            self.d_out,
            self.indices,
            self.heads,
            self.sequences,
            self.block,
            self.scale,
            index,
            d_kl,
        )

    def kl(self, teacher):
        """sum p (log p - log pi) / (Hi Tq) for given teachers, token by token."""
        total = 0.0
        per = self.heads // self.index_k.shape[1]
        for (r, i), p in teacher.items():
            tokens = np.array(sorted(p))
            z = self.index_scale * self.index_k[tokens, r // per] @ self.index_q[i, r]
            log_pi = z - z.max() - np.log(np.exp(z - z.max()).sum())
            weights = np.array([p[t] for t in tokens])
            total += (weights * (np.log(weights) - log_pi)).sum()
        return total / (self.heads * len(self.index_q))

    def tokens(self, r, i):
        """Rows of the visible tokens of the selected blocks, the plainest way."""
        for first, n_q, rows in self.sequences:
            if first <= i < first + n_q:
                last = len(rows) - n_q + i - first
                blocks = {b for b in self.indices[r, i].tolist() if b >= 0}
                return [int(row) for j, row in enumerate(rows) if j <= last and j // self.block in blocks]
        return []

    def teachers(self):
        group, per = self.q.shape[1] // self.heads, self.q.shape[1] // self.k.shape[1]
        result = {}
        for r in range(self.heads):
            for i in range(len(self.q)):
                tokens = self.tokens(r, i)
                if not tokens:
                    continue
                mean = np.zeros(len(tokens))
                for h in range(r * group, (r + 1) * group):
                    s = np.exp(self.scale * self.k[tokens, h // per] @ self.q[i, h])
                    mean += s / s.sum() / group
                result[r, i] = dict(zip(tokens, mean, strict=True))
        return result


def close(a, b, tolerance):
    return np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-30)


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_forward_token_by_token(numbers):
    p = Problem(numbers)
    out, lse = p.attend()
    group, per = p.q.shape[1] // p.heads, p.q.shape[1] // p.k.shape[1]
    for i in range(len(p.q)):
        for h in range(p.q.shape[1]):
            tokens = p.tokens(h // group, i)
            if not tokens:
                assert lse[h, i] == -np.inf
                assert not out[i, h].any()
                continue
            s = p.scale * p.k[tokens, h // per] @ p.q[i, h]
            assert lse[h, i] == pytest.approx(np.log(np.exp(s).sum()), rel=1e-12)
            np.testing.assert_allclose(out[i, h], np.exp(s - lse[h, i]) @ p.v[tokens, h // per], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_selection_row_by_row(numbers):
    p = Problem(numbers)
    per = p.heads // p.index_k.shape[1]
    for first, n_q, rows in p.sequences:
        for i in range(n_q):
            last = len(rows) - n_q + i
            for r in range(p.heads):
                got = p.indices[r, first + i]
                if last < 0:
                    assert (got == -1).all()
                    continue
                z = p.index_k[rows[: last + 1], r // per] @ p.index_q[first + i, r]
                own = last // p.block
                best = [(-z[b * p.block : (b + 1) * p.block].max(), b) for b in range(own)]
                expected = [b for _, b in sorted(best)[: p.topk - 1]] + [own]
                assert got.tolist() == expected + [-1] * (p.topk - len(expected))


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_gradients_by_finite_differences(numbers):
    p = Problem(numbers)
    g = p.backward(0.7)
    teachers = p.teachers()
    random = np.random.default_rng(1)

    def difference(f, x, at, step=1e-6):
        kept = x.flat[at]
        x.flat[at] = kept + step
        above = f()
        x.flat[at] = kept - step
        below = f()
        x.flat[at] = kept
        return (above - below) / (2 * step)

    def loss():
        return (p.attend()[0] * p.d_out).sum()

    for x, grad, f in (
        (p.q, g.q, loss), (p.k, g.k, loss), (p.v, g.v, loss),
        (p.index_q, g.index_q, lambda: 0.7 * p.kl(teachers)), (p.index_k, g.index_k, lambda: 0.7 * p.kl(teachers)),
    ):  # fmt: skip
        at = random.choice(x.size, min(25, x.size), replace=False)
        numeric = np.array([difference(f, x, a) for a in at])
        assert np.abs(numeric - grad.flat[at]).max() <= 1e-6 * max(np.abs(grad).max(), 1e-3)


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_identities_of_the_training_signal(numbers):
    p = Problem(numbers)
    teachers = p.teachers()
    g = p.backward(1.0)
    assert g.kl == pytest.approx(p.kl(teachers), rel=1e-10)
    per = p.heads // p.index_k.shape[1]
    upstream = 1.0 / (p.heads * len(p.q))
    for (r, i), weights in teachers.items():
        tokens, teacher = np.array(list(weights)), np.array(list(weights.values()))
        assert teacher.sum() == pytest.approx(1, abs=1e-12)
        z = p.index_scale * p.index_k[tokens, r // per] @ p.index_q[i, r]
        log_pi = z - p.lse[r, i]
        pi = np.exp(log_pi)
        assert pi.sum() == pytest.approx(1, abs=1e-12)
        cross_entropy = -(teacher * log_pi).sum()
        entropy = -(pi * log_pi).sum()
        assert cross_entropy == pytest.approx(entropy + p.index_q[i, r] @ g.index_q[i, r] / upstream, abs=1e-9)
        moments = upstream * p.index_scale * (pi - teacher) @ p.index_k[tokens, r // per]
        np.testing.assert_allclose(moments, g.index_q[i, r], rtol=1e-8, atol=1e-15)


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_disjoint_selections_combine_to_the_whole(numbers):
    p = Problem(numbers)
    even, odd = p.indices.copy(), p.indices.copy()
    even[..., 1::2], odd[..., ::2] = -1, -1
    parts = [p.attend(even), p.attend(odd)]
    out, lse = oracle.combine(np.stack([o for o, _ in parts]), np.stack([x for _, x in parts]))
    whole_out, whole_lse = p.attend()
    np.testing.assert_allclose(out, whole_out, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)


@pytest.mark.parametrize("numbers", PROBLEMS)
def test_captured_mass_bounds(numbers):
    p = Problem(numbers)
    share, best = oracle.captured_mass(p.q, p.k, p.indices, p.sequences, p.block, p.scale)
    sees = p.indices[..., 0] >= 0
    assert (share[sees] > 0).all()
    assert (share <= best + 1e-12).all()
    assert (best <= 1 + 1e-12).all()
    assert not share[~sees].any()
    everything = np.broadcast_to(np.arange(64), (*p.indices.shape[:2], 64))
    share, best = oracle.captured_mass(p.q, p.k, everything, p.sequences, p.block, p.scale)
    np.testing.assert_allclose(share[sees], 1, atol=1e-12)
    np.testing.assert_allclose(best, share, atol=1e-12)


def test_forced_blocks_take_slots():
    sequences = [(0, 1, np.arange(80))]
    index_q, index_k = np.ones((1, 1, 1)), np.repeat(np.array([3.0, 9, 1, 7, 5, 2, 8, 4, 6, 0]), 8)[:, None, None]

    def chosen(topk, init, local):
        return oracle.select(
            index_q, index_k, sequences, topk=topk, block_size=8, init_blocks=init, local_blocks=local, scale=1.0
        )[0][0, 0].tolist()  # fmt: skip

    assert chosen(4, 0, 1) == [1, 6, 3, 9]
    assert chosen(4, 0, 0) == [1, 6, 3, 8]
    assert chosen(4, 1, 2) == [1, 0, 8, 9]  # block 0 by its score among the scored, local ones last
    assert chosen(3, 5, 2) == [0, 8, 9]
    assert chosen(2, 0, 5) == [8, 9]  # the nearest local blocks are kept
    assert chosen(1, 3, 0) == [0]
    assert chosen(12, 0, 1) == [1, 6, 3, 8, 4, 7, 0, 5, 2, 9, -1, -1]


def test_scores_at_the_edges():
    index_q = np.ones((1, 1, 1))
    score = np.array([0.0, -0.0, np.nan, -np.inf, 0.0, np.nan, 1.0, 0.0])
    indices, lse = oracle.select(
        index_q,
        score[:, None, None],
        [(0, 1, np.arange(8))],
        topk=8,
        block_size=1,
        init_blocks=0,
        local_blocks=0,
        scale=1.0,
    )
    assert indices[0, 0].tolist() == [6, 0, 1, 4, 7, 2, 3, 5]
    assert np.isnan(lse[0, 0])


def test_rounding_to_float8():
    stored = oracle.store_e4m3(np.array([1e9, -1e9, 0.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10]), 1.0).astype(
        np.float32
    )
    assert stored.tolist() == [448.0, -448.0, 0.0, 1.0, 1.25, 0.0, 2.0**-8]
    assert oracle.store_e4m3(np.array([3.0]), 2.0).dtype == ml_dtypes.float8_e4m3fn
