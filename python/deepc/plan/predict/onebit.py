"""When exchanging momentum in 1 bit pays: a small model of volume, bandwidth and computing. No tensors, no processes.

An all-reduce of n elements over N nodes sends 2 (N - 1) / N n elements from each node, whatever its number of ranks: 4
bytes each in fp32, PAYLOAD in 1 bit. In 1 bit the processors also pack, average and unpack, chunk by chunk beside the
wire: the slower of the two counts, and of the other one chunk. `deepc bench onebit` measures the numbers."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 2048  # elements of a scale, as optim/onebit uses it
PAYLOAD = 1 / 8 + 4 / BLOCK  # bytes of an element: its sign, and its share of a scale
CHUNK = 4 << 20  # elements of a round
BACKWARD = 2 / 3  # of a step's computing: what gradients can cross beside


@dataclass(frozen=True)
class Network:
    """`nodes` nodes of `ranks` ranks each. bandwidth: bytes/s that a node sends while it receives as many. latency:
    seconds of a small message from node to node."""

    nodes: int
    ranks: int
    bandwidth: float
    latency: float = 0.0

    def crossing(self, nbytes: float, rounds: int = 1) -> float:
        """Seconds of an all-reduce of so many bytes: to those who add up, and back."""
        if self.nodes == 1:
            return 0.0
        return 2 * (self.nodes - 1) / self.nodes * nbytes / self.bandwidth + 2 * rounds * self.latency


@dataclass(frozen=True)
class Kernels:
    """Seconds an element on one rank while the others of its node do the same. pack: with the worker's error; serve:
    averaging what the nodes sent, with the server's error; unpack. rotate: what is sent, before and again after (the
    option `rotated`); 0: it is not."""

    pack: float
    serve: float
    unpack: float
    rotate: float = 0.0


def seconds_fp32(n: float, network: Network) -> float:
    """Of an uncompressed all-reduce of n fp32 elements between the nodes."""
    return network.crossing(4 * n)


def seconds_packing(n: float, network: Network, kernels: Kernels) -> float:
    """What a rank's processor does for a 1-bit all-reduce of n elements: each rank of a node packs its column and
    serves a slice of it, and unpacks all."""
    column = n / network.ranks
    return column * kernels.pack + column / network.nodes * kernels.serve + n * kernels.unpack


def seconds_onebit(n: float, network: Network, kernels: Kernels) -> float:
    """Of a 1-bit all-reduce of n elements, which nothing is beside while they are rotated."""
    chunks = max(1, round(n / CHUNK))
    wire, own = network.crossing(PAYLOAD * n, chunks), seconds_packing(n, network, kernels)
    return max(wire, own) + min(wire, own) / chunks + 2 * n * kernels.rotate


@dataclass(frozen=True)
class Forecast:
    """Of a step that computes for `compute` seconds and exchanges n elements. Seconds: fp32, onebit: of the exchange;
    hidden: what of the fp32 one backward can hide, if buckets cross beside it (momentum is exchanged after it)."""

    compute: float
    fp32: float
    onebit: float

    @property
    def hidden(self) -> float:
        return min(self.fp32, BACKWARD * self.compute)

    @property
    def speedup(self) -> float:
        """Of a step, where nothing overlaps."""
        return (self.compute + self.fp32) / (self.compute + self.onebit)

    @property
    def least(self) -> float:
        """Of a step, where the uncompressed exchange overlaps with backward as far as it can."""
        return (self.compute + self.fp32 - self.hidden) / (self.compute + self.onebit)

    def of_a_run(self, warm_up: float, least: bool = False) -> float:
        """Of a run whose first `warm_up` (a share of the steps) exchange uncompressed gradients. least: as `least`."""
        plain = self.compute + self.fp32 - (self.hidden if least else 0.0)
        return plain / (warm_up * plain + (1 - warm_up) * (self.compute + self.onebit))


def forecast(n: float, compute: float, network: Network, kernels: Kernels) -> Forecast:
    """Of a model of n elements."""
    return Forecast(compute, seconds_fp32(n, network), seconds_onebit(n, network, kernels))


def break_even(n: float, compute: float, network: Network, kernels: Kernels, gain: float = 1.1) -> float:
    """The bandwidth (bytes/s) up to which a step is at least `gain` times as fast in 1 bit, where the uncompressed
    exchange overlaps with backward; 0 if it is at none. Latencies are those of `network`."""

    def pays(rate: float) -> bool:
        return forecast(n, compute, Network(network.nodes, network.ranks, rate, network.latency), kernels).least >= gain

    low, high = 1e3, 1e13
    if network.nodes == 1 or not pays(low):
        return 0.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
