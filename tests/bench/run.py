"""Runs the benches one after the other, prints JSON lines, and writes docs/bench.md.

    python tests/bench/run.py --quick            10 minutes on 2 cores (make bench), once DeepSpeed's ops are built
    python tests/bench/run.py --full             everything, about an hour (make bench-full)
    python tests/bench/run.py --smoke            toy sizes: does everything still run? writes nothing
    python tests/bench/run.py --quick --only train --no-write
    python tests/bench/run.py --install-peers    installs DeepSpeed, transformers and mpi4py into this environment;
    torch stays as it is

Peers that are not installed are named as skipped, and so is tcmalloc (apt-get install libtcmalloc-minimal4). Run it on
a quiet machine: every figure is the median of interleaved rounds, every ratio the median of the rounds' own ratios, but
other work beside it makes the absolute numbers worthless (the report says so).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import collectives
import peers
import training
from common import EXTENSIONS, HERE, REPO, cores_in_use, die_with_parent, machine, number, slow_bf16, value
from contenders import ALLOCATORS

BENCHES = ("ops", "adamw", "update", "sparse_attention", "collectives", "train")
QUICK_S = 570  # of the quick form: training, which comes last, gets what the others leave of it
LIMIT_S = 3600  # of one bench process: a hang ends
QUIET = 0.3  # cores that others use, above which a machine is not
SLOW, MOST = 0.95, 12  # a ratio below is a loss; so many of one form's are named


def plan(mode: str, has_deepspeed: bool) -> dict[str, list[tuple[int, list[str]]]]:
    """Per bench its processes: (threads, command line)."""
    k = 1 << 10
    if mode == "smoke":
        train = [["--model", "tiny", "--tokens", "32", "--rounds", "2", "--precision", p] for p in ("fp32", "bf16")]
        return {
            "adamw": [(2, ["--case", "smoke", "--threads", "2", "--rounds", "3", "--foreach"])],
            "update": [(2, ["--case", "smoke", "--threads", "2", "--rounds", "3"])],
            "sparse_attention": [(2, ["--tokens", "256", "--rounds", "2"])],
            "collectives": [
                (
                    1,
                    [
                        "--ranks",
                        "2",
                        "--quick",
                        "--rounds",
                        "2",
                        "--target-ms",
                        "1",
                        "--bytes",
                        str(4 * k),
                        str(256 * k),
                    ],
                )
            ],
            "train": [(1, a + ["--contenders", *c]) for a in train for c in _batches(has_deepspeed)],
        }
    quick = mode == "quick"
    rounds = "5" if quick else "9"
    adamw = [
        ("GPT-2", 2, True),
        *([] if quick else [(c, t, t == 2) for c in ("64M", "256M") for t in (2, 1)] + [("GPT-2", 1, False)]),
    ]
    # Full: bursts of about 2 s; bf16 steps are shorter.
    steps = {"fp32": "2", "bf16": "4"}
    train = [["--precision", p, "--steps", steps[p], "--rounds", "9"] for p in _precisions()]
    return {
        "adamw": [
            (t, ["--case", c, "--threads", str(t), "--rounds", rounds, *(["--foreach"] if f else [])])
            for c, t, f in adamw
        ],
        "update": [(t, ["--threads", str(t), "--rounds", rounds]) for t in ([2] if quick else [2, 1])],
        "sparse_attention": [
            (2, ["--quick"] if quick else ["--tokens", "1024", "4096", "16384", "--blocks", "16", "64", "--flex"])
        ],
        "collectives": [(1, ["--ranks", "2", "--quick", "--budget", "40"])]
        if quick
        else [(1, ["--ranks", str(n)]) for n in (2, 4)],
        "train": [(1, _quick_train())]
        if quick
        else [(1, a + ["--contenders", *c]) for a in train for c in _batches(has_deepspeed)],
    }


def _precisions() -> list[str]:
    return ["fp32"] if slow_bf16() else ["fp32", "bf16"]


LIMIT = ["independent+keep", "independent-autocast+keep"]
MINE = ["deepc-3", "deepc-3-fused"]


def _quick_train() -> list[str]:
    """Both precisions where 16 bits are of use, each peer as it comes and at its best: in two groups, as many as fit
    into 24 GiB together. A step each, since more rounds say more than longer bursts; what others left in the caches is
    little beside a step of this size, and the same for all."""
    first = [*LIMIT, *_matmul(), "ddp", "ddp+best", "ddp-fused+keep", *MINE]
    second = [f"{base}{form}" for base in ("fsdp2", "fsdp2-kept", "deepspeed-3") for form in ("", "+best")]
    short = ["--steps", "1", "--settle", "0", "--rounds", "5", "--warmup", "0", "--sampled", "2", "--fork"]
    return ["--precision", *_precisions(), *short, "--contenders", *first, "--contenders", *second, *MINE]


def _matmul() -> list[str]:
    """What has deepc's products and nothing else of deepc's, where those are others than torch's."""
    from deepc.core.cpu import fast_products

    fast = any(fast_products(p)[0] for p in _precisions())
    return ["independent-matmul+keep", "ddp-matmul+keep"] if fast else []


def _batches(has_deepspeed: bool) -> list[list[str]]:
    """All contenders in groups that fit into memory together; each group has deepc's stage 3 and the limit, for the
    ratios."""

    def every(base: str) -> list[str]:
        return [base, *(f"{base}+{allocator}" for allocator in ALLOCATORS)]

    groups = [
        [*every("ddp"), *every("ddp-bf16-weights"), *_matmul(), "ddp-fused+keep", "ddp-deepc+keep"],
        [*every("fsdp2"), "zero-redundancy", "zero-redundancy+keep"],
        every("fsdp2-kept"),
        [
            "single",
            "single-autocast",
            "single-deepc",
            "independent",
            "independent-autocast",
            "deepc-0",
            "deepc-1",
            "deepc-2",
        ],
    ]
    if has_deepspeed:
        groups.insert(
            3, [*every("deepspeed-3"), "deepspeed-1", "deepspeed-1+keep", "deepspeed-2+keep", "deepspeed-3-small+keep"]
        )
    return [LIMIT + group + MINE for group in groups]


# ---- running ---------------------------------------------------------------------------------------------------------
def stream(command: list[str], threads: int) -> tuple[list[dict], int]:
    """Runs one bench process in a session of its own; passes its JSON lines on and returns them with its exit
    status."""
    process = subprocess.Popen(
        command,
        env=peers.environment(threads) | {"PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=REPO,
        preexec_fn=die_with_parent,
    )
    rows, end = [], time.monotonic() + LIMIT_S
    try:
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(line, end="", flush=True)
            else:
                print(line, end="", file=sys.stderr, flush=True)
            if time.monotonic() > end:
                raise TimeoutError
        return rows, process.wait(timeout=60)
    finally:
        try:  # whatever it left: its ranks are in its session or end when their pipes close
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def run_ops(mode: str) -> tuple[list[dict], int]:
    """bench_ops.c (C only, no torch), built here against the library that Python loads."""
    from common import compiled, require_deepc, skip

    require_deepc()
    from deepc.core.lib import library_dir

    folder = str(library_dir())
    try:
        program = compiled(
            "bench_ops.c", "bench_ops", f"-L{folder}", "-ldeepc", f"-Wl,-rpath,{folder}", "-lpthread", "-lm"
        )
    except subprocess.CalledProcessError as exc:
        skip("ops", "bench_ops", f"does not compile ({exc.returncode})")
        return [], 1
    if program is None:
        skip("ops", "bench_ops", "no C compiler")
        return [], 0
    elements, rounds = {"smoke": ("100000", "5"), "quick": (str(16 << 20), "5"), "full": (str(64 << 20), "9")}[mode]
    raw, code = stream([str(program), "--n", elements, "--rounds", rounds], 2)
    rows = []
    for r in raw:
        rows.append(
            {
                "bench": "ops",
                "figure": f"{r['op']} {r['dtype']}, {r['memory']}, {r['threads']} thread{'s' * (r['threads'] > 1)}",
                "what": f"deepc ({r['isa']})",
                "unit": "ms",
                **{k: round(1e3 * r[f"{k}_s"], 4) for k in ("median", "q1", "q3", "min", "max")},
                "n": r["rounds"],
                "ratio": r["ratio"],
                "peer": "limit of its memory pattern",
                "gb_per_s": r["gb_per_s"],
                "elements": r["n"],
            }
        )
    return rows, code


def run_all(mode: str, only: list[str], why: str) -> tuple[list[dict], list[str]]:
    """why: there is no DeepSpeed, or "" where there is."""
    rows, failures, began = [], [], time.monotonic()
    left_out = [("peers", "DeepSpeed", why), ("train", "bf16", slow_bf16() if mode != "smoke" else "")]
    for bench, what, because in left_out:
        if because and (bench == "peers" or bench in only):
            rows.append({"bench": bench, "skipped": what, "why": because})
            print(json.dumps(rows[-1]), flush=True)
    for bench, processes in {"ops": None, **plan(mode, not why)}.items():
        if bench not in only:
            continue
        started = time.monotonic()
        for index, (threads, arguments) in enumerate(processes if processes is not None else [(0, [])]):
            if bench == "train" and mode == "quick":
                arguments = [*arguments, "--budget", f"{max(1.0, QUICK_S - (time.monotonic() - began)):.0f}"]
            made, code = (
                run_ops(mode)
                if bench == "ops"
                else stream([sys.executable, str(HERE / f"{bench}.py"), *arguments], threads)
            )
            rows += [{**r, "process": index} for r in made]
            if code:
                failures.append(f"{bench} {' '.join(arguments)}: exit status {code}")
        print(f"bench: {bench} took {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return rows, failures


# ---- the page --------------------------------------------------------------------------------------------------------
HEADS = {
    "ops": (
        "Each op of the C core beside the limit of its own memory pattern: a loop with the same reads and writes and no"
        " arithmetic, on the same arrays and threads (`bench_ops.c`). 1.00: the op costs what its memory traffic costs."
    ),
    "adamw": (
        '"As it comes": parameters and gradients from torch.randn, states as each optimizer allocates them. "Huge": the'
        " same staggered huge-page memory for everyone. The engine steps on such memory. The limit is a loop of 4 reads"
        " and 3 writes in place per element, on the engine's memory, in the same rounds: the fastest of several ways to"
        ' write it. The process has imported deepc, which switches torch\'s huge pages on: "as it comes" is better for'
        " peers here than in a program without deepc."
    ),
    "update": (
        "Unscale, global norm, clip, AdamW on fp32 masters, bf16 write-back, on GPT-2's 148 tensors. \"Norm from the"
        " reduction\": as in the engine, where the gradients' reduction has made the squared sums already."
    ),
    "sparse_attention": (
        "Attention of 12 heads of 64 (`tests/bench/sparse_attention.py`): torch's scaled_dot_product_attention (SDPA),"
        " dense deepc, and deepc where each block of queries sees a random part of the keys. A density's ratio is that"
        " density times dense deepc over its own time: 1.00 is the ideal."
    ),
    "collectives": (
        'Microseconds of the slowest rank, one thread a rank; bytes of the larger tensor of the call. "C core": called'
        ' from a loop in C, as MPI and, in TorchScript, DeepSpeed; "torch": backend deepc through torch.distributed,'
        " beside Gloo, mpi4py and DeepSpeed called from Python. Ordinary: torch's memory; registered: each rank's own"
        " memory in a dc_segment (the peers are measured on it too). × is the time of the best peer, named behind it,"
        ' over ours. "Of the limit": the bytes that must move, each read once and written once by equal shares of all'
        " ranks, at the rate of a plain copy by all ranks at once of their own memory (in brackets: of memory that a"
        ' peer has just written), over our time. "Root in turns": call i has root i modulo ranks, so that no root can'
        " run ahead."
    ),
    "train": (
        "A 25 M-parameter GPT-2 (320 wide, 7 layers, vocabulary 50257), micro-batch 2 x 256 tokens, AdamW, clipping at"
        " 1.0, one thread and one core a rank. Everyone started from the same weights."
        " Page faults are a large part of a step on a CPU, and a user can take them away for any peer: so each runs"
        " as it comes and with glibc's tunables"
        " (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184`),"
        " with tcmalloc in malloc's place (`LD_PRELOAD`), and with `deepc.memory.keep_heap()`, which is for any"
        " program."
        " The quick form takes of these the one with the shortest step in a screening (the table behind the"
        " others) in fp32, and the same in bf16, of autocast and bf16 weights for DDP; the full form has all."
        " A table is a group that took turns (quick: a step each). The limit: as many processes as ranks at the same"
        " time, with `keep_heap()`, that never talk; where deepc makes products itself, the faster of those"
        " with and without them (`deepc.precision.fast_matmul()`)."
        " × is deepc's speed over the row's, with the quartiles of the rounds' own ratios; of memory, the row's over"
        " deepc's. PSS: highest sum over the ranks, polled in steps that nobody times; VmHWM: sum of the ranks' highest"
        " resident sets as the kernel keeps them, set-up included, pages that are shared counted for each rank."
    ),
}


def page(rows: list[dict], command: str, busy: float, seconds: float) -> str:
    lines = [
        "# Benchmarks",
        "",
        (
            "Generated by the command below; do not edit. A figure is the median of interleaved rounds (quartiles in"
            " brackets), a ratio the"
        ),
        (
            "median of the rounds' own ratios; above 1 means that deepc is better. Compare ratios, not figures of"
            " different runs."
        ),
        "",
        f"    {command}",
        "",
        "| | |",
        "|---|---|",
    ]
    lines += [f"| {k} | {v} |" for k, v in machine().items()]
    lines += [f"| cores in use before the start | {busy:.2f} |", f"| time | {seconds / 60:.0f} min |", ""]
    if busy > QUIET:
        lines += ["**The machine was not quiet; these figures are worth little.**", ""]
    for bench in BENCHES:
        mine = [r for r in rows if r["bench"] == bench and "skipped" not in r]
        if mine:
            lines += [f"## {bench}", "", HEADS[bench], ""] + TABLES.get(bench, tables)(mine) + [""]
    lines += ["## Where it is slower", "", SLOWER, "", *slower(rows), ""]
    skipped = list(dict.fromkeys(f"- {r['bench']}: {r['skipped']} ({r['why']})" for r in rows if "skipped" in r))
    return "\n".join(lines + (["## Skipped", "", *skipped, ""] if skipped else []))


SLOWER = f"Ratios to peers below {SLOW}, the worst first, by the form of deepc that they are of; `ops` has no peers."


def slower(rows: list[dict]) -> list[str]:
    """A line per bench and form of deepc that loses somewhere."""
    found: dict[tuple[str, str], dict[tuple[str, str], tuple[float, str]]] = {}
    for r in rows:
        peer = r.get("peer") or ""
        # limits are no peers, nor is deepc itself: a density's ratio is to a part of its own dense time
        own = peer.startswith("deepc") or peer.endswith("of deepc, dense")
        if r.get("ratio") is None or r["bench"] == "ops" or peer.startswith(("limit", "ideal", "best of")) or own:
            continue
        key = f"{r['figure']}, {r['unit']}" if r["bench"] == "train" else r["figure"]
        found.setdefault((r["bench"], r["what"]), {})[key, peer] = r["ratio"], peer
    out = []
    for (bench, what), ratios in found.items():
        lost = sorted((ratio, figure, peer) for (figure, _), (ratio, peer) in ratios.items() if ratio < SLOW)
        if lost:
            some = "; ".join(f"{figure}: {ratio:.2f} to {peer}" for ratio, figure, peer in lost[:MOST])
            more = f"; and {len(lost) - MOST} more" if len(lost) > MOST else ""
            out.append(f"- {bench}, {what}: {len(lost)} of {len(ratios)} ratios. {some}{more}")
    return out or ["- nowhere"]


def ops_table(rows: list[dict]) -> list[str]:
    return ["| op | ms | GB/s | of the limit |", "|---|---|---|---|"] + [
        f"| {r['figure']} | {value(r)} | {r['gb_per_s']:.1f} | {r['ratio']:.2f} |" for r in rows
    ]


def collectives_table(rows: list[dict]) -> list[str]:
    """One row per figure: deepc three ways with the best peer of each; then the summary."""
    out = ["| | C core, ordinary | × | C core, registered | × | of the limit | torch | × |", "|---" * 8 + "|"]
    for figure in dict.fromkeys(r["figure"] for r in rows):
        here = {r["what"]: r for r in rows if r["figure"] == figure}
        cells = []
        for what in ("deepc C core", "deepc C core, registered", "deepc"):
            r = here.get(what)
            cells += (
                [
                    number(r["median"]),
                    f"{r['ratio']:.2f} {r['peer']} {number(here[r['peer']]['median'])}" if r["peer"] else "",
                ]
                if r
                else ["", ""]
            )
            if what.endswith("registered"):
                cells.append(
                    f"{r['of_limit']:.2f} ({r['of_peer_limit']:.2f})"
                    if r and r["bytes"] >= 1 << 20 and "of_peer_limit" in r
                    else ""
                )
        out.append(f"| {figure} | " + " | ".join(cells) + " |")
    return [*out, "", "```", *collectives.summary(rows), "```"]


def tables(rows: list[dict]) -> list[str]:
    """One table per figure and unit: contenders with their values and ratios. A contender measured in several groups
    has several rows."""
    out: list[str] = []
    for figure, unit in dict.fromkeys((r["figure"], r["unit"]) for r in rows):
        here = [r for r in rows if (r["figure"], r["unit"]) == (figure, unit)]
        out += [f"**{figure}**", "", f"| | {unit} | ratios |", "|---|---|---|"]
        for what, median, low, high in dict.fromkeys((r["what"], r["median"], r["min"], r["max"]) for r in here):
            same = [r for r in here if (r["what"], r["median"], r["min"], r["max"]) == (what, median, low, high)]
            ratios = dict.fromkeys(f"{r['ratio']:.2f} {_of(r['peer'])}" for r in same if r["ratio"] is not None)
            out.append(f"| {what} | {value(same[0])} | {'; '.join(ratios)} |")
        out.append("")
    return out


def _of(peer: str) -> str:
    return f"of the {peer}" if peer.startswith(("limit", "ideal")) else f"to {peer}"


TABLES = {"ops": ops_table, "collectives": collectives_table, "train": training.tables}


# ---- command line ----------------------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", dest="mode", action="store_const", const="quick", default="quick")
    mode.add_argument("--full", dest="mode", action="store_const", const="full")
    mode.add_argument("--smoke", dest="mode", action="store_const", const="smoke")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument(
        "--write",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write docs/bench.md (default: when all benches ran, not for --smoke)",
    )
    parser.add_argument("--rows", type=Path, help="also keep the JSON lines in this file")
    parser.add_argument(
        "--install-peers",
        action="store_true",
        help="install DeepSpeed, transformers and mpi4py, build DeepSpeed's ops, and stop",
    )
    args = parser.parse_args()
    if args.install_peers:
        peers.install()
        why = peers.deepspeed_ops()
        print(f"bench: {why or 'the peers are installed and built'}")
        return bool(why)
    EXTENSIONS.mkdir(exist_ok=True)
    busy, started = cores_in_use(), time.monotonic()
    why = peers.deepspeed_ops()
    if (took := time.monotonic() - started) > 30:
        print(f"bench: building DeepSpeed's ops took {took:.0f} s", file=sys.stderr, flush=True)
    started = time.monotonic()
    if busy > QUIET:
        print(
            f"bench: {busy:.1f} cores are in use: the machine is not quiet, and the figures will be worth little",
            file=sys.stderr,
        )
    rows, failures = run_all(args.mode, args.only, why)
    seconds = time.monotonic() - started
    if args.rows:
        args.rows.write_text("".join(json.dumps(r) + "\n" for r in rows))
    write = (
        args.write
        if args.write is not None
        else args.mode != "smoke" and set(args.only) == set(BENCHES) and not failures
    )
    if write:
        command = "make bench" if args.mode == "quick" else f"make bench-{args.mode}"
        target = REPO / "docs" / "bench.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(page(rows, f"{command}    (python tests/bench/run.py --{args.mode})", busy, seconds))
        print(f"bench: wrote docs/bench.md in {seconds / 60:.1f} min", file=sys.stderr)
    for failure in failures:
        print(f"bench: FAILED {failure}", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
