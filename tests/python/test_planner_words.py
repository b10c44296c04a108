"""What `deepc plan --cluster` refuses: each is one typed error that names the value, the place and the fix."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from deepc.cli import main
from deepc.errors import ArgumentError, OutOfMemoryError
from deepc.plan.predict.search.cluster import Cluster, quantity
from deepc.plan.predict.search.models import NAMED, Model
from deepc.plan.predict.search.planner import Space, case_of, require_fit, search
from deepc.plan.schedule import KINDS

TWO_NODES = """\
network: {bandwidth: 25 GB/s}
nodes:
  - {type: a100-80gb, count: 2, ranks: 8, memory: {host: 1 TiB}}
"""


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs `deepc plan --cluster`; what it says of a refusal, which is one line and no traceback."""

    def run(*options: str, text: str = TWO_NODES, model: str = "gpt2", name: str = "cluster.yaml") -> str:
        if not name.endswith(".json"):
            pytest.importorskip("yaml")
        (tmp_path / name).write_text(text)
        capsys.readouterr()
        code = main(["plan", "--cluster", str(tmp_path / name), "--model", model, *options])
        shown = capsys.readouterr()
        assert (code, shown.out) == (2, ""), options
        said = shown.err.strip()
        assert said.startswith("deepc plan: error: ") and "\n" not in said, said
        return said.replace(str(tmp_path) + "/", "")

    return run


@pytest.mark.parametrize(
    "options, said",
    [
        ("--dp 0", ("--dp 0", "from 1 to", "leave --dp out")),
        ("--tp -1", ("--tp -1", "leave --tp out")),
        ("--micro 0", ("--micro 0", "leave --micro out")),
        ("--pp 99999999999999999999", ("--pp 99999999999999999999", "131072")),
        ("--batch 0", ("--batch 0", "at least 1")),
        ("--batch 99999999999999999999", ("batch 99999999999999999999", "whole number from 1 to")),
        ("--seq -3", ("--seq -3", "at least 1")),
        ("--keep 0", ("--keep 0", "at least 1")),
        ("--keep 99999999999", ("keep 99999999999", "10000 layouts")),
        ("--write /nowhere/ds.json", ("--write /nowhere/ds.json", "No such file", "name a file")),
        ("--html /nowhere/plan.html", ("--html /nowhere/plan.html", "name a file")),
    ],
)
def test_numbers_on_the_command_line(refused, options, said):
    text = refused(*options.split())
    assert [s for s in said if s not in text] == [], text


@pytest.mark.parametrize(
    "options, said",
    [
        ("--dp 32", ("dp 32 needs 32 ranks, and the cluster has 16", "describe more nodes")),
        ("--dp 4 --tp 8", ("dp 4 x tp 8 needs 32 ranks", "has 16")),
        ("--dp 3", ("dp 3 does not divide the 16 ranks", "1, 2, 4, 8, 16")),
        ("--dp 4 --tp 2 --pp 1 --sp 1", ("is 8 of the 16 ranks", "Leave one of them free")),
        ("--pp 16", ("pp 16", "stages (pp) are more than the 12 blocks of gpt2", "at most 12")),
        ("--tp 8", ("3 ways", "tp) do not divide the 12 heads", "1, 2, 3, 4, 6, 12")),
        ("--tp 4 --sp 4", ("tp 4 x sp 4", "tp x sp) do not divide the 12 heads", "1, 2, 3, 4, 6, 12")),
        ("--sp 4 --dp 4 --seq 1023", ("sp 4", "do not divide the 1023 tokens", "Change --seq")),
        ("--ep 2", ("ep 2", "gpt2 has no experts", "Leave ep out")),
        ("--dp 16 --batch 7", ("dp 16", "dp) do not divide the 7 samples", "a multiple of 16")),
        ("--dp 16 --micro 3 --batch 32", ("micro-batch 3 does not divide", "a step's 32", "a multiple of dp x micro")),
        ("--batch 1125899906842624", ("1125899906842624", "at most 131072", "a smaller --batch")),
        ("--pp 8 --batch 2 --pipeline-schedule zb-v", ("zb-v needs two blocks", "Choose 1f1b")),
        ("--pp 4 --tp 4 --batch 3 --pipeline-schedule interleaved", ("interleaved needs", "ranks divide")),
        ("--pp 4 --recompute yes --pipeline-schedule zb-h1", ("zb-h1 needs", "no block again")),
        ("--offload cpu --stage 0", ("offload cpu with ZeRO stage 0", "Choose a higher stage, or none")),
        ("--offload nvme", ("offload nvme", "nodes 'a100-80gb' have no disk", "memory.disk, bandwidth.disk")),
    ],
)
def test_layouts_that_are_impossible(refused, options, said):
    text = refused(*options.split())
    assert "no layout of 16 ranks is possible for gpt2: " in text
    assert [s for s in said if s not in text] == [], text


def test_experts_that_can_not_be_spread(refused):
    assert "ep 3 does not divide the 8 experts of mixtral-8x7b. Sizes that do: 1, 2, 4, 8" in refused(
        "--ep", "3", model="mixtral-8x7b"
    )
    text = refused("--ep", "8", "--dp", "4", "--tp", "4", "--sp", "1", model="mixtral-8x7b")
    assert "ep 8 does not divide the ranks that may share experts (dp x sp)" in text


ROW = "nodes:\n  - {type: a100-80gb, count: 2, ranks: 8, memory: {host: 1 TiB}"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", ("file is empty", "give name, network and nodes")),
        ("  \n\n", ("file is empty",)),
        ("# a comment\n", ("expected a mapping with name, nodes", "got None")),
        ("nodes: [", ("no YAML",)),
        ("a\0b", ("no YAML",)),
        ("[" * 5000, ("no YAML",)),
        ("- type: a100-80gb\n", ("expected a mapping", "a list: leave the dash out")),
        ("nodes: {type: a100-80gb}\n", ("nodes must be a list", "got {'type': 'a100-80gb'}")),
        ("nodes: []\n", ("nodes must be a list", "got []")),
        ("nodes: [1]\n", ("nodes[0]: expected a mapping", "got 1")),
        (ROW.replace("{host: 1 TiB}", "[1 TiB]") + "}", ("nodes[0]: memory: expected a mapping", "a list")),
        (TWO_NODES.replace("{bandwidth: 25 GB/s}", "[25 GB/s]"), ("network: expected a mapping", "a list")),
        ("network:\n" + ROW + "}", ("network: expected a mapping", "got None")),
        (TWO_NODES.replace("network", "netwrok"), ("unknown key 'netwrok'", "did you mean network?")),
        (TWO_NODES.replace("25 GB/s", "25 GB"), ("network.bandwidth", "'25 GB' is a size in bytes", "'25 GB/s'")),
        (TWO_NODES.replace("25 GB/s", "200 Gbit/s"), ("'200 Gbit/s' has no unit", "100 Gbit/s are 12.5 GB/s")),
        (TWO_NODES.replace("25 GB/s", "5 us"), ("network.bandwidth", "'5 us' is a time", "as in 25 GB/s")),
        (TWO_NODES.replace("25 GB/s", "0"), ("network.bandwidth", "0 must be a finite number above 0")),
        (TWO_NODES.replace("25 GB/s", "-1"), ("network.bandwidth", "-1 must be a finite number")),
        (TWO_NODES.replace("25 GB/s", ".nan"), ("network.bandwidth", "nan must be a finite number")),
        (TWO_NODES.replace("25 GB/s", "1" + 400 * "0"), ("network.bandwidth", "must be a finite number")),
        (TWO_NODES.replace("25 GB/s", "fast"), ("network.bandwidth", "'fast' is not a number")),
        (TWO_NODES.replace("25 GB/s", "25 GB/s, latency: 5 GB"), ("network.latency", "must be a time", "as in 5 us")),
        (TWO_NODES.replace("1 TiB", "1 TiB/s"), ("memory.host", "'1 TiB/s' is bytes in a second", "as in 80 GiB")),
        (TWO_NODES.replace("1 TiB", "0"), ("nodes[0]: memory.host", "0 must be a finite number above 0")),
        (TWO_NODES.replace("host: 1 TiB", "host: 1 TiB, device: 0"), ("memory.device", "above 0", "80 GiB")),
        (TWO_NODES.replace("{host: 1 TiB}", "{}"), ("memory.host is missing", "memory: {host: 80 GiB}")),
        (TWO_NODES.replace("a100-80gb", "a100-80"), ("type 'a100-80' is not known", "did you mean a100-80gb?")),
        (TWO_NODES.replace("a100-80gb", "[a, b]"), ("type ['a', 'b'] is not known", "leave type out")),
        (TWO_NODES.replace("ranks: 8", "ranks: 0"), ("nodes[0]: ranks", "0 must be a whole number of at least 1")),
        (TWO_NODES.replace("ranks: 8", "ranks: 8.5"), ("nodes[0]: ranks", "8.5 must be a whole number")),
        (TWO_NODES.replace("ranks: 8, ", ""), ("nodes[0]: ranks", "None must be a whole number")),
        (TWO_NODES.replace("count: 2", "count: 0"), ("nodes[0]: count", "0 must be a whole number")),
        (TWO_NODES.replace("count: 2", "count: 2 nodes"), ("nodes[0]: count", "without a unit")),
        (TWO_NODES.replace("count: 2", "count: 99999999999999999999"), ("nodes[0]: count", "at most 131072")),
        (TWO_NODES.replace("count: 2", "count: 131072"), ("1048576 ranks", "at most 131072", "fewer nodes")),
        (TWO_NODES + "overlap: 2\n", ("overlap 2 must be 0 to 1",)),
        (TWO_NODES + "overlap: 1 GB\n", ("overlap", "'1 GB' is a size in bytes", "as in 0.7")),
        (ROW + ", flops: 312 TFLOP/s}", ("flops is '312 TFLOP/s'", "by precision", "{bf16: 312 TFLOP/s}")),
        (ROW + ", flops: {bf16: 312 TFLOP}}", ("flops.bf16", "a number of operations", "'312 TFLOP/s'")),
        (ROW + ", flops: {bf16: 0}}", ("flops.bf16", "above 0")),
        (ROW + ", flops: {fp8: 1e15}}", ("flops.fp8", "precisions are fp32, bf16, fp16")),
        (ROW + ", attainable: 0}", ("attainable 0 must be above 0",)),
        (ROW + ", attainable: {bf17: 0.5}}", ("attainable.bf17", "it has bf16, fp16, fp32")),
        (ROW + ", reserve: 5 us}", ("reserve", "'5 us' is a time", "80 GiB")),
        (ROW + ", start: 1 GB}", ("start", "must be a time", "5 us")),
        ("nodes:\n" + 9 * ROW.splitlines()[1].join(("", "}\n")), ("nodes has 9 kinds", "at most 8", "count")),
        (
            ROW + "}\n  - {ranks: 8, flops: {fp32: 1e12}, memory: {host: 1 TiB}, bandwidth: {device: 20 GB/s},"
            " link: {bandwidth: 1 GB/s}}",
            ("nodes[1]: memory.device is 0", "nodes[0] has devices", "each kind by itself"),
        ),
    ],
)
def test_words_in_the_file(refused, text, said):
    """Each names the file and the key."""
    shown = refused(text=text)
    assert "cluster cluster.yaml: " in shown
    assert [s for s in said if s not in shown] == [], shown


def test_other_files(refused, tmp_path, capsys):
    assert "cluster a.json: no JSON" in refused(text="{", name="a.json")
    assert "cluster a.json: the file is empty" in refused(text="", name="a.json")
    assert "cluster a.json: nodes must be a list" in refused(text="{}", name="a.json")
    assert "network.bandwidth: nan must be" in refused(
        text=json.dumps({"network": {"bandwidth": float("nan")}, "nodes": [{"type": "a100-80gb", "ranks": 8,
                                                                           "memory": {"host": 1e12}}]}), name="a.json"
    )  # fmt: skip
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    for path, said in (("nowhere.yaml", "No such file"), (".", "Is a directory"), ("latin.yaml", "can't decode")):
        assert main(["plan", "--cluster", str(tmp_path / path), "--model", "gpt2"]) == 2
        shown = capsys.readouterr().err
        assert said in shown and "--cluster names a description of nodes" in shown
    assert main(["plan", "--dp", "0"]) == 2
    assert "--dp is an option of --cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model, said",
    [
        ("layers=\u00b2,hidden=64,heads=4,vocab=100,seq=32", "expected a whole number"),
        ("layers=0,hidden=64,heads=4,vocab=100,seq=32", "layers = 0 must be a whole number of at least 1"),
        ("layers=99999999999,hidden=64,heads=4,vocab=100,seq=32", "layers = 99999999999 must be at most"),
        ("layers=2,hidden=64,heads=4,vocab=100,seq=99999999999999999999", "seq = 99999999999999999999 must be at most"),
        ("gpt5", "no file, and no name"),
    ],
)
def test_words_of_models(refused, model, said):
    assert said in refused(model=model)


MIXTURE = """{"model_type": "qwen2_moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3,
 "vocab_size": 100, "max_position_embeddings": 16, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}"""


@pytest.mark.parametrize(
    "text, said",
    [
        ("[1]", ("m.json: expected an object", "got a list")),
        ('{"model_type": "x"}', ("error: model ", "m.json: the config has none of hidden_size")),
        ("{", ("no JSON",)),
        # half of its blocks were planned for
        ('{"model_type": "t5", "is_encoder_decoder": true, "d_model": 64}', ("is_encoder_decoder is true", "layers=")),
        (MIXTURE.replace("3,", "99999999999,"), ("layers = 99999999999 must be at most",)),  # not after a look at each
        (MIXTURE.replace("[1]", "1"), ("mlp_only_layers = 1 must be a list of whole numbers",)),
        (MIXTURE.replace("[1]", "[1.5]"), ("mlp_only_layers = [1.5] must be a list of whole numbers",)),
        (
            MIXTURE.replace("32,", "-32,"),
            ("shared_expert_intermediate_size = -32 must be a whole number of at least 0",),
        ),
    ],
)
def test_words_of_a_models_file(refused, tmp_path, text, said):
    (tmp_path / "m.json").write_text(text)
    cluster = {"nodes": [{"type": "a100-80gb", "ranks": 8, "memory": {"host": "1 TiB"}}]}
    shown = refused(model=str(tmp_path / "m.json"), text=json.dumps(cluster), name="cluster.json")
    assert [s for s in said if s not in shown] == [] and ("no JSON" in shown) == (text == "{"), shown


def test_units_are_those_of_what_is_described():
    for value, kind, found in (
        ("100 GB/s", "rate", 1e11), ("80 GiB", "bytes", 80 * 2**30), ("312 TFLOP/s", "flops", 312e12),
        ("312 TFLOPS", "flops", 312e12), ("5 us", "time", 5e-6), (7, "rate", 7), ("1e9", "rate", 1e9),
    ):  # fmt: skip
        assert quantity(value, "x", kind) == pytest.approx(found)
    for value, kind, fix in (
        ("100 GB", "rate", "'100 GB/s'"), ("100 GB/s", "bytes", "80 GiB"), ("312 TFLOP", "flops", "'312 TFLOP/s'"),
        ("312 TB/s", "flops", "312 TFLOP/s"), ("5 GB", "time", "5 us"), ("5 s", "number", "0.7"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"x: '{value}' is .* must be .*{fix}"):
            quantity(value, "x", kind)


def described(**node) -> Cluster:
    return Cluster.of({"name": "c", "nodes": [{"type": "a100-80gb", "ranks": 8, "memory": {"host": "1 TiB"}, **node}]})


def test_what_fits_nowhere_says_how_much_is_missing_and_where(refused):
    """The nearest layout, and of each tier that is too small how much is missing."""
    found = search(case_of(described(), NAMED["gpt3-175b"], 16))
    with pytest.raises(OutOfMemoryError) as raised:
        require_fit(found)
    cost, text = found.closest.cost, str(raised.value)
    assert f"Closest: {found.closest.layout}" in text
    short = 0
    for tier, need, room in (
        ("memory of a device", cost.device_bytes, cost.device_room),
        ("memory of a node", cost.host_bytes, cost.host_room),
        ("disk of a node", cost.disk_bytes, cost.disk_room),
    ):
        short += need > room
        assert (
            f"GiB of {tier} (there are {room / 2**30:.4g}: {(need - room) / 2**30:.4g} GiB are missing)" in text
        ) == (need > room)
    assert short
    assert "GiB are missing" in refused("--batch", "16", model="gpt3-175b")
    # a disk of no size is no end of missing: said in bytes, not as a multiple
    none = described(memory={"host": "1 TiB", "disk": 0}, bandwidth={"disk": "6 GB/s"})
    with pytest.raises(OutOfMemoryError, match=r"GiB of disk of a node \(there are 0: .* GiB are missing"):
        require_fit(search(case_of(none, NAMED["gpt2"], 16), Space(offloads=("nvme",))))


def test_a_tier_that_lacks_room_on_one_kind_of_node_is_named():
    """Not the tier of the rank that holds most, which has room."""
    small = {"type": "a100-80gb", "ranks": 8, "memory": {"host": "1 TiB", "device": "4 GiB"}}
    two = Cluster.of({"nodes": [{**small, "memory": {"host": "1 TiB"}}, small]})
    found = search(case_of(two, NAMED["gpt3-13b"], 16), Space(pp=2, tp=8, offloads=("none",)))
    with pytest.raises(OutOfMemoryError, match=r"GiB of memory of a device \(there are 4: .* GiB are missing"):
        require_fit(found)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(3000), marks=pytest.mark.full)], ids=["150", "3000"])
def test_the_reason_is_the_reason(seeds):
    """Random wants: where nothing is possible the reason is of the sizes exactly where no stage, offload or
    recomputation would help."""
    refusals = offloads = 0
    for seed in seeds:
        draw = random.Random(seed)
        heads = draw.choice([4, 6, 8])
        model = Model(
            "m", draw.choice([1, 2, 3, 4, 12]), 64 * heads, heads, 1000, draw.choice([32, 33, 48]),
            kv_heads=draw.choice([heads, 2]), experts=draw.choice([0, 0, 4, 6]),
        )  # fmt: skip
        wanted = draw.sample(("dp", "tp", "pp", "sp", "ep", "micro"), draw.choice([0, 1, 1, 2, 3]))
        sizes = {n: draw.choice([1, 2, 2, 3, 4, 8]) for n in wanted}
        space = Space(
            **sizes,
            stages=draw.choice([(0,), (1,), (0, 1, 3)]),
            offloads=draw.choice([("none",), ("cpu",), ("nvme",), ("none", "cpu")]),
            recomputes=draw.choice([(True,), (False, True)]),
            schedules=draw.choice([KINDS, ("zb-v",), ("interleaved",), ("zb-h1", "interleaved")]),
        )
        disk = draw.choice(["0", "6 GB/s"])
        nodes = described(
            ranks=draw.choice([1, 2, 4, 6]), count=draw.choice([1, 2]), bandwidth={"disk": disk},
            memory={"host": "1 TiB", "disk": "1 TB"},
        )  # fmt: skip
        case = case_of(nodes, model, draw.choice([1, 2, 6, 7, 8, 12, 16]))
        try:
            search(case, space)
            continue
        except ArgumentError as exc:
            said = str(exc)
        refusals += 1
        free = replace(space, stages=(0, 1, 2, 3), offloads=("none",))
        try:
            search(case, free)
            possible = True
        except ArgumentError:
            possible = False
        assert (": offload " in said) == possible, (seed, said)
        offloads += possible
    assert refusals > len(seeds) / 3 and offloads > len(seeds) / 50
