"""Records made by hand: whatever a benchmark may leave behind, good and bad."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from freight.bench import _registry
from freight.bench._record import Cell, Measured, Record, Rival, Target
from freight.bench._registry import Benchmark

HOSTILE = '<script>alert("x")</script> | $a_b$ *c* `d` ]]> --> \x1b[31m ${e} &amp; \u202egnp'
OLD = "sha256:old"


def measured(name: str, median: float, runs: int = 30) -> Measured:
    low, high = median * 0.99, median * 1.02
    return Measured(name, median, low, high, runs, tuple([low, median, high] * (runs // 3)))


def rival(name: str, median: float, ratio: float, spread: float = 0.01) -> Rival:
    return Rival(name, None, measured(name, median), ratio, ratio * (1 - spread), ratio * (1 + spread))


def absent(name: str, reason: str) -> Rival:
    return Rival(name, absent=reason)


def target(what: str, at_least: float, worse_end: float | None) -> Target:
    return Target(what, "ratio", at_least, None, worse_end, worse_end is not None and worse_end >= at_least)


def ceiling(what: str, at_most: float, worse_end: float) -> Target:
    return Target(what, "value", None, at_most, worse_end, worse_end <= at_most)


def make_cell(
    name: str,
    group: str,
    axes: dict,
    median: float,
    rivals: Sequence[Rival] = (),
    targets: Sequence[Target] = (),
    *,
    subject: str = "freight arena",
    unit: str = "GB/s",
    better: str = "higher",
    code: str = "",
    **rest,
) -> Cell:
    return Cell(
        id=name,
        group=group,
        axes=axes,
        unit=unit,
        better=better,
        subject=measured(subject, median),
        rivals=tuple(rivals),
        targets=tuple(targets),
        checked=rest.pop("checked", "every byte"),
        commit=rest.pop("commit", "85f547b0c0ffee"),
        dirty=rest.pop("dirty", False),
        date=rest.pop("date", "2026-11-18T10:20:30+00:00"),
        code=code,
        versions=rest.pop("versions", {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.4.0"}),
        **rest,
    )


@pytest.fixture(scope="module")
def code() -> Iterator[str]:
    """The fingerprint of today's code of the benchmarks `links` and `hostile`; any other is stale."""
    with pytest.MonkeyPatch.context() as patch:
        bench = Benchmark("stand-in", "Stand-in", ("freight._units",), lambda run: None)
        for name in ("links", "hostile"):
            patch.setitem(_registry._registered, name, bench)
        yield bench.code()


def links_record(code: str) -> Record:
    sizes = [2**20 * 4**power for power in range(6)]
    copy = [
        make_cell(
            f"copy/{direction}/{size}",
            "copy",
            {"direction": direction, "bytes": size, "dtype": "bf16"},
            55.4 * size / (size + 2**20),
            [
                rival("torch copy_, pinned", 55.0 * size / (size + 2**20), ratio),
                rival("torch copy_, pageable", 7.5, 55.4 / 7.5),
                absent("kvikio", "No module named 'kvikio'"),
            ],
            [target("against torch copy_, pinned", 0.98, ratio * 0.99)],
            code=code,
        )
        for direction, ratio in (("host to GPU", 1.012), ("GPU to host", 0.985))
        for size in sizes
    ]
    both = make_cell(
        "both",
        "both directions",
        {"bytes": 2**30},
        101.3,
        [rival("torch copy_ on two streams", 100.9, 1.004, 0.006)],
        [target("arena, GB/s", 0.95, 1.0), target("against kvikio", 0.9, None)],
        code=code,
        note="Both copies start on one event.",
        extra={"stall_seconds": 0.0012, "overlap": True},
    )
    pins = [
        make_cell(
            f"pin/{kind}",
            "pinning",
            {"memory": kind, "bytes": 32 * 2**30},
            seconds,
            [rival("Tensor.pin_memory", 9.8, ratio)],
            [ceiling("freight arena, s", 8.0, seconds * 1.02)],
            unit="s",
            better="lower",
            code=stamp,
            quick=quick,
            dirty=quick,
            commit="0123456789abcdef" if quick else "85f547b0c0ffee",
            date="2026-11-20T01:02:03+00:00" if quick else "2026-11-18T10:20:30+00:00",
        )
        for kind, seconds, ratio, stamp, quick in (
            ("fresh", 5.1, 1.92, code, False),
            ("caller's own", 8.6, 1.14, OLD, False),
            ("huge pages", 12.4, 0.79, code, True),
        )
    ]
    machine = {"gpu": {"name": "NVIDIA H200", "sms": 132, "memory": [139, 141]}, "cpu_cores": 16, "cuda_file": None}
    return Record("links", "Host and GPU", "h200", "NVIDIA H200", (*copy, both, *pins), machine)


def hostile_record(code: str) -> Record:
    long = "anamewithoutanyplacetobreak" * 6
    cells = [
        make_cell(
            HOSTILE,
            HOSTILE,
            {"kind": HOSTILE},
            1.5,
            [rival(HOSTILE, 1e-9, 1.5e9), absent(long, HOSTILE)],
            [target(HOSTILE, 1.0, 2.0)],
            subject=HOSTILE,
            note=HOSTILE,
            checked=HOSTILE,
            extra={HOSTILE: HOSTILE},
            code=code,
        ),
        make_cell(
            "other", HOSTILE, {"kind": long}, 0.0, [rival("zero", 0.0, 1.0)], subject=long, checked=long, code=code
        ),
        make_cell("same place 1", long, {"case": 1}, 4.0, code=code),
        make_cell("same place 2", long, {"case": 1}, 5.0, code=code, quick=True),
        *(
            make_cell(f"many/{n}", "many", {"n": n, "layout": layout}, 10.0 * n, unit=unit, code=code)
            for n, layout, unit in [(1, "a", "ms"), (2, "b", "MiB"), *((n, "c", "s") for n in range(3, 25))]
        ),
        make_cell(
            "数据", "数据 😀", {"层": None, "aligned": True}, 123456.7, [rival("競争", 1234.5, 100.0)], code=code
        ),
    ]
    return Record("hostile", HOSTILE, "cpu", "", tuple(cells), {HOSTILE: {HOSTILE: [HOSTILE, {"x": 1}]}})


@pytest.fixture
def make() -> SimpleNamespace:
    """What records are made of."""
    return SimpleNamespace(
        cell=make_cell, rival=rival, absent=absent, target=target, ceiling=ceiling, hostile=HOSTILE, old=OLD
    )


@pytest.fixture(scope="module")
def links(code: str) -> Record:
    return links_record(code)


@pytest.fixture(scope="module")
def hostile(code: str) -> Record:
    return hostile_record(code)


@pytest.fixture(scope="module")
def gallery(links: Record, hostile: Record) -> list[Record]:
    return [links, hostile, Record("empty", "Nothing yet", "h200", "NVIDIA H200", ())]
