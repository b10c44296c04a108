"""The algorithms of the 1-bit optimizers in NumPy and fp64, as their papers have them, one step at a time.

A step begins with what the ranks had (fp32) and ends with what they must have. Signs of numbers so near to zero that
rounding decides them are taken from the errors that the step left; `undecided` counts them."""

from __future__ import annotations

import numpy as np

BLOCK = 2048


def rotate(x):
    """D H D x / sqrt(length) of each block, the last ones of powers of two (ops/ops.h, dc_rotate)."""
    x, at = x.astype(np.float64).ravel(), 0
    while at < x.size:
        length = min(BLOCK, 1 << ((x.size - at).bit_length() - 1))
        i = np.arange(length, dtype=np.uint64)
        h = (i ^ i >> np.uint64(16)) * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
        h = (h ^ h >> np.uint64(13)) * np.uint64(0xC2B2AE35) & np.uint64(0xFFFFFFFF)
        signs = np.where(h >> np.uint64(31) == 1, -1.0, 1.0)
        y = x[at : at + length] * signs
        for k in range(length.bit_length() - 1):
            y = y.reshape(-1, 2, 1 << k)
            y = np.stack([y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]], 1)
        x[at : at + length] = y.ravel() / np.sqrt(length) * signs
        at += length
    return x


class Exchange:
    """Sign times mean magnitude of a block, with worker and server errors (Tang et al., arXiv:2102.02888). A tensor
    has blocks of its own; the last one is filled with repeats of what the tensor has in it."""

    def __init__(self, numels, world, parts=None, alone=False, rotated=False):
        """alone: one worker compresses too, twice. rotated: tensors are, before and after."""
        self.numels, self.world, self.undecided, self.seen = numels, world, 0, 0
        self.turn = rotate if rotated else lambda x: x
        self.exact = world == 1 and not alone
        self.ends, at = [], 0
        for n in numels:
            at += -(-n // BLOCK) * BLOCK
            self.ends.append(at)
        whole = BLOCK * (parts or world)
        self.total = -(-at // whole) * whole

    def lay_out(self, tensors):
        out, at = np.zeros(self.total), 0
        for x, end in zip(tensors, self.ends):
            x = self.turn(x.ravel())
            out[at : at + x.size] = x
            tail = x.size % BLOCK
            if tail:
                out[at + x.size : end] = np.resize(x[-tail:], end - at - x.size)
            at = end
        return out

    def tensors(self, buffer):
        begins = [0, *self.ends[:-1]]
        return [self.turn(buffer[at : at + n]) for at, n in zip(begins, self.numels)]

    def encode(self, x, error, left):
        """(what arrives, the new error). left: the error that the tested code left, which knows the sign it sent."""
        y = x + error
        scale = np.abs(y).reshape(-1, BLOCK).mean(1).repeat(BLOCK)
        near = np.abs(y) < 1e-5 * (np.abs(x) + np.abs(error) + scale)
        sent = np.where(near, np.where(y - left >= 0, 1.0, -1.0), np.where(y >= 0, 1.0, -1.0)) * scale
        self.undecided += int((near & (scale > 0)).sum())
        self.seen += int((scale > 0).sum())
        return sent, y - sent

    def mean(self, per_rank, workers, servers, left_workers, left_servers):
        """per_rank: each rank's tensors. Returns (tensors, worker errors, server errors)."""
        if self.exact:
            return per_rank[0], workers, servers
        sent, after = zip(*(self.encode(self.lay_out(x), e, e2) for x, e, e2 in zip(per_rank, workers, left_workers)))
        whole, server = self.encode(sum(sent) / self.world, np.concatenate(servers), np.concatenate(left_servers))
        return self.tensors(whole), list(after), np.split(server, self.world)


class Columns:
    """Several Exchanges: the ranks of a node have parts of the tensors, and each exchanges its own with the ranks of
    the same number on the other nodes. Errors of all parts lie one after the other."""

    def __init__(self, columns):
        self.columns, self.world, self.total = columns, columns[0].world, sum(c.total for c in columns)

    @property
    def undecided(self):
        return sum(c.undecided for c in self.columns)

    @property
    def seen(self):
        return sum(c.seen for c in self.columns)

    def mean(self, per_worker, *errors):
        tensors, after, at, done = [], [[], []], [0, 0], 0
        for c in self.columns:
            sizes = c.total, c.total // c.world
            cut = [[e[at[k % 2] : at[k % 2] + sizes[k % 2]] for e in errors[k]] for k in range(4)]
            some, *left = c.mean([x[done : done + len(c.numels)] for x in per_worker], *cut)
            tensors += some
            done, at = done + len(c.numels), [a + n for a, n in zip(at, sizes)]
            for to, parts in zip(after, left):
                to.append(parts)
        return tensors, *([np.concatenate(parts) for parts in zip(*kind)] for kind in after)


def adam(p, m, v, g, o):
    """One step without corrections of the bias, with decoupled decay. Returns p, m, v."""
    m = o["b1"] * m + (1 - o["b1"]) * g
    v = o["b2"] * v + (1 - o["b2"]) * g * g
    return apply(p, m, v, o), m, v


def apply(p, m, v, o):
    return p - o["lr"] * (m / (np.sqrt(v) + o["eps"]) + o["wd"] * p)


class OneBitAdam:
    """before, after: of each rank, {"p", "exp_avg", ...: lists of arrays, "worker", "server": arrays, "numbers"}."""

    def __init__(self, exchange, options):
        self.exchange, self.o = exchange, options

    def step(self, before, grads, after):
        o, ex = self.o, self.exchange
        out = [{k: v for k, v in b.items()} for b in before]
        if before[0]["numbers"]["steps"] < o["freeze_step"]:
            mean = [sum(g) / ex.world for g in zip(*grads)]
            for r in out:
                new = [adam(p, m, v, g, o) for p, m, v, g in zip(r["p"], r["exp_avg"], r["exp_avg_sq"], mean)]
                r["p"], r["exp_avg"], r["exp_avg_sq"] = (list(x) for x in zip(*new))
            return out
        local = [[o["b1"] * m + (1 - o["b1"]) * g for m, g in zip(r["exp_avg"], gs)] for r, gs in zip(out, grads)]
        roots = [np.sqrt(v) + o["eps"] if o.get("preconditioned") else 1.0 for v in out[0]["exp_avg_sq"]]
        most = o["max_update"] if o.get("preconditioned") else np.inf  # of a step, before it travels and after
        local = [[np.clip(x / root, -most, most) for x, root in zip(xs, roots)] for xs in local]
        m, workers, servers = self.mean(local, before, after)
        m = [np.clip(x, -most, most) * root for x, root in zip(m, roots)]
        for k, r in enumerate(out):
            r["exp_avg"], r["worker"], r["server"] = m, workers[k], servers[k]
            self.apply(r, before[k])
        return out

    def mean(self, local, before, after):
        e = [[r[k] for r in rs] for rs in (before, after) for k in ("worker", "server")]
        return self.exchange.mean(local, e[0], e[1], e[2], e[3])

    def apply(self, r, before):
        r["p"] = [apply(p, m, v, self.o) for p, m, v in zip(r["p"], r["exp_avg"], r["exp_avg_sq"])]


class OneBitLamb(OneBitAdam):
    """of: the parameter that each tensor is a piece of (default: each is one)."""

    of = None

    def norms(self, tensors):
        """Of the parameters that the tensors are pieces of."""
        of = self.of or range(len(tensors))
        squares = [sum((t**2).sum() for t, other in zip(tensors, of) if other == k) for k in of]
        return np.sqrt(squares)

    def step(self, before, grads, after):
        o, ex = self.o, self.exchange
        if before[0]["numbers"]["steps"] >= o["freeze_step"]:
            return super().step(before, grads, after)
        out = [{k: v for k, v in b.items()} for b in before]
        mean = [sum(g) / ex.world for g in zip(*grads)]
        for r in out:
            means = list(r["numbers"]["means"])
            for name in ("p", "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"):
                r[name] = list(r.get(name, r["exp_avg_sq"]))
            updates, of = [], self.of or list(range(len(mean)))
            for i, g in enumerate(mean):
                m = r["exp_avg"][i] = o["b1"] * r["exp_avg"][i] + (1 - o["b1"]) * g
                v = r["exp_avg_sq"][i] = o["b2"] * r["exp_avg_sq"][i] + (1 - o["b2"]) * g * g
                updates.append(m / (np.sqrt(v) + o["eps"]) + o["wd"] * r["p"][i])
                if r["numbers"]["steps"] + 1 == o["freeze_step"]:
                    r["exp_avg_sq_fresh"][i] = v
            norms, found = self.norms(r["p"]), self.norms(updates)
            ratios = np.where((norms > 0) & (found > 0), np.clip(norms / np.maximum(found, 1e-300), 0.01, 10.0), 1.0)
            for k, ratio in dict(zip(of, ratios)).items():
                if ratio != 1:
                    means[k] = o["coeff_beta"] * means[k] + (1 - o["coeff_beta"]) * ratio
            r["p"] = [p - o["lr"] * ratio * u for p, ratio, u in zip(r["p"], ratios, updates)]
            r["numbers"] = {**r["numbers"], "means": means}
        return out

    def apply(self, r, before):
        o, factors, of = self.o, list(r["numbers"]["factors"]), self.of or list(range(len(r["p"])))
        r["exp_avg_sq_fresh"], alone, most = list(r["exp_avg_sq_fresh"]), [], {}
        for i, (m, v) in enumerate(zip(r["exp_avg"], r["exp_avg_sq"])):
            g = (m - o["b1"] * before["exp_avg"][i]) / (1 - o["b1"])
            fresh = r["exp_avg_sq_fresh"][i] = o["b2"] * r["exp_avg_sq_fresh"][i] + (1 - o["b2"]) * g * g
            root = np.sqrt(v) + o["eps"]
            alone.append(m / root)
            most[of[i]] = max(most.get(of[i], 0.0), (root / (np.sqrt(fresh) + o["eps"])).max(initial=0.0))
        updates = [a + o["wd"] * p for a, p in zip(alone, r["p"])]
        shares = np.minimum(1.0, self.norms(alone) / self.norms(updates))
        for k, share in dict(zip(of, shares)).items():
            last = factors[k]
            factor = most[k] * share + 1 - share
            factor = min(max(factor, o["factor_min"]), o["factor_max"])
            factors[k] = min(max(factor, last * (1 - o["factor_threshold"])), last * (1 + o["factor_threshold"]))
        means = r["numbers"]["means"]
        r["p"] = [p - o["lr"] * means[k] * factors[k] * u for k, p, u in zip(of, r["p"], updates)]
        r["numbers"] = {**r["numbers"], "factors": factors}


class LiveLamb(OneBitLamb):
    """OneBitLamb(ratios="live"), which is deepc's own: the bounded momentum over the frozen variance's root travels,
    and each step has the ratio of the norms of the parameter and of the step that came."""

    def step(self, before, grads, after):
        o = self.o
        if before[0]["numbers"]["steps"] < o["freeze_step"]:
            return super().step(before, grads, after)
        out = [{k: v for k, v in b.items()} for b in before]
        roots = [np.sqrt(v) + o["eps"] for v in out[0]["exp_avg_sq"]]
        most = o["max_update"]
        local = [
            [
                np.clip((o["b1"] * m + (1 - o["b1"]) * g) / root, -most, most)
                for m, g, root in zip(r["exp_avg"], gs, roots)
            ]
            for r, gs in zip(out, grads)
        ]
        steps, workers, servers = self.mean(local, before, after)
        steps = [np.clip(s, -most, most) for s in steps]
        for k, r in enumerate(out):
            updates = [s + o["wd"] * p for s, p in zip(steps, r["p"])]
            norms, found = self.norms(r["p"]), self.norms(updates)
            ratios = np.where((norms > 0) & (found > 0), np.clip(norms / np.maximum(found, 1e-300), 0.01, 10.0), 1.0)
            r["exp_avg"] = [s * root for s, root in zip(steps, roots)]
            r["p"] = [p - o["lr"] * ratio * u for p, ratio, u in zip(r["p"], ratios, updates)]
            r["worker"], r["server"] = workers[k], servers[k]
        return out


class ZeroOneAdam(OneBitAdam):
    def step(self, before, grads, after):
        o, ex, n = self.o, self.exchange, before[0]["numbers"]
        out, t = [{k: v for k, v in b.items()} for b in before], n["steps"] + 1
        if n["steps"] < o["var_freeze_step"]:
            if t % n["var_interval"] == 0:
                mean = [sum(g) / ex.world for g in zip(*grads)]
                for r in out:
                    new = [adam(p, m, v, g, o) for p, m, v, g in zip(r["p"], r["exp_avg"], r["exp_avg_sq"], mean)]
                    r["p"], r["exp_avg"], r["exp_avg_sq"] = (list(x) for x in zip(*new))
            else:
                mean, workers, servers = self.mean(grads, before, after)
                for k, r in enumerate(out):
                    r["exp_avg"] = [o["b1"] * m + (1 - o["b1"]) * g for m, g in zip(r["exp_avg"], mean)]
                    r["worker"], r["server"] = workers[k], servers[k]
                    self.apply(r, before[k])
            if t == o["var_freeze_step"]:
                for r in out:
                    r["worker"], r["server"] = np.zeros(ex.total), np.zeros(ex.total // ex.world)
            return out
        moved = []
        for r, gs in zip(out, grads):
            r["exp_avg"] = [o["b1"] * m + (1 - o["b1"]) * g for m, g in zip(r["exp_avg"], gs)]
            steps = [
                -o["lr"] * (m / (np.sqrt(v) + o["eps"]) + o["wd"] * p)
                for p, m, v in zip(r["p"], r["exp_avg"], r["exp_avg_sq"])
            ]
            r["base"] = [p - u for p, u in zip(r["p"], r["momentum_accumulator"])]
            r["p"] = [p + s for p, s in zip(r["p"], steps)]
            r["momentum_accumulator"] = [u + s for u, s in zip(r["momentum_accumulator"], steps)]
            roots = [np.sqrt(v) + o["eps"] for v in r["exp_avg_sq"]]
            sent = [1.0] * len(roots) if o.get("preconditioned") else roots
            moved.append([u * root for u, root in zip(r["momentum_accumulator"], sent)])
        if t % n["local_interval"]:
            return out
        mean, workers, servers = self.mean(moved, before, after)
        if o.get("preconditioned"):
            mean = [x * root for x, root in zip(mean, roots)]
        lrs = n["lrs"][0] + o["lr"]
        for k, r in enumerate(out):
            r["worker"], r["server"] = workers[k], servers[k]
            r["exp_avg"] = [-x / lrs for x in mean]
            r["p"] = [b + x / (np.sqrt(v) + o["eps"]) for b, x, v in zip(r["base"], mean, r["exp_avg_sq"])]
            r["momentum_accumulator"] = [np.zeros_like(x) for x in mean]
        return out


def method_of(name, options):
    """The class of an optimizer's name and options."""
    return LiveLamb if options.get("ratios") == "live" else globals()[name]
