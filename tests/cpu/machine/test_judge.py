"""Every line of the doctor's, as it passes, warns and fails, with the remedy that goes with it."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freight._units import GiB, KiB, MiB
from freight.machine import Compute, Disk, DiskRate, Gpu, Host, Link, Machine, RandomRead, Reads, Software
from freight.machine._judge import FAIL, PASS, WARN, Finding, judge

NO_GPU = {
    "gpu": Gpu("no NVIDIA driver answers"),
    "link": Link("none"),
    "reads": Reads("none"),
    "compute": Compute("none"),
}
RAISE = r"`ulimit -l unlimited`.*`--ulimit memlock=-1`"
ELSEWHERE = "FREIGHT_DISK_DIR"
FEW = 64 * KiB


def changed(machine: Machine, **parts: Any) -> Machine:
    """`machine` with other parts, or with other fields of a part where a dictionary is given."""
    new = {
        name: dataclasses.replace(getattr(machine, name), **part) if isinstance(part, dict) else part
        for name, part in parts.items()
    }
    return dataclasses.replace(machine, **new)


def line(machine: Machine, name: str, **known: Any) -> Finding:
    [finding] = [finding for finding in judge(machine, **known) if finding.name == name]
    return finding


def rates(*pairs: tuple[int, float]) -> Reads:
    """Rows of 256 bytes, by the size of the table."""
    return Reads(sequential_gbs=51.3, random=tuple(RandomRead(table, 256, gbs) for table, gbs in pairs))


def test_a_machine_in_good_order_passes(h200: Machine) -> None:
    findings = judge(h200, usual=h200)
    assert [finding for finding in findings if finding.verdict != PASS] == []
    assert [finding.name for finding in findings] == [
        *("Python", "torch", "CUDA", "Triton", "driver"),
        *("GPU", "GPU memory", "PCIe", "copy to the GPU", "copy from the GPU", "both ways at once", "small copy"),
        *("reads in place", "random rows of 256 MiB", "random rows of 8 GiB", "translation reach"),
        *("fp32 matrix product", "tf32 matrix product", "bf16 matrix product", "GPU memory copy"),
        *("processor", "memory", "lockable memory", "memory copy"),
        *("directory", "direct I/O", "free", "write", "read", "cuFile", "cache"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Python", "3.12.11"),
        ("CUDA", "13.0, as torch was built for"),
        ("GPU", "NVIDIA H200, 132 SMs, compute capability 9.0"),
        ("GPU memory", "139 GiB free of 140 GiB; L2 60 MiB"),
        ("PCIe", "generation 5 x16"),
        ("copy to the GPU", "55.5 GB/s"),
        ("copy from the GPU", "55.3 GB/s"),
        ("both ways at once", "101 GB/s together"),
        ("small copy", "9.1 µs"),
        ("reads in place", "51.3 GB/s in order"),
        ("random rows of 256 MiB", "64 B: 41, 256 B: 50, 4 KiB: 50 GB/s"),
        (
            "translation reach",
            "256 MiB; from larger tables 40.6 million page look-ups a second are the limit, "
            "which is usual: wide rows, rows ordered by address and cached rows need fewer",
        ),
        ("bf16 matrix product", "675 TFLOP/s"),
        ("GPU memory copy", "4300 GB/s read and written"),
        ("processor", "Intel Xeon, 16 usable cores"),
        ("memory", "120 GiB available of 125 GiB"),
        ("lockable memory", "unlimited"),
        ("memory copy", "10 GB/s, pageable, all threads"),
        ("directory", "/var/tmp (ext4)"),
        ("direct I/O", "in force"),
        ("free", "500 GiB"),
        ("write", "4.4 GB/s at best (16 threads, 8 MiB blocks)"),
        ("read", "4.2 GB/s at best (1 thread, 1 MiB blocks)"),
        ("cuFile", "works, through host memory"),
        ("cache", "writable"),
    ],
)
def test_what_is_told_of_it(h200: Machine, name: str, value: str) -> None:
    assert line(h200, name).value == value


CASES = [
    # software
    ("torch", {"software": {"torch": "2.10.1+cu128"}}, WARN, "2.10.1", "torch 2.11 and later; upgrade"),
    ("torch", {"software": {"torch": "1.13.1"}}, WARN, "1.13.1", "upgrade"),
    ("torch", {"software": {"torch": "2.11.0a0+git1234"}}, PASS, "2.11.0a0", None),
    ("torch", {"software": {"torch": "3.0.0"}}, PASS, "3.0.0", None),
    ("CUDA", {"software": {"cuda": None}}, WARN, "torch is a build without", "a build of torch with CUDA"),
    ("CUDA", {"software": {"cuda": None, "driver": None}, **NO_GPU}, PASS, "torch is a build without", None),
    ("Triton", {"software": {"triton": None}}, FAIL, "not installed", "pip install triton"),
    ("Triton", {"software": {"triton": None}, **NO_GPU}, PASS, "not needed without a GPU", None),
    # the GPU
    ("GPU", NO_GPU, WARN, "no NVIDIA driver answers", "runs without one, slowly"),
    (
        "GPU",
        {**NO_GPU, "gpu": Gpu("the NVIDIA driver (1) sees 1 GPU, and CUDA does not start: no", blocked=True)},
        FAIL,
        "CUDA does not start",
        "Restart the driver or the container.*`nvidia-smi`",
    ),
    ("GPU", {"gpu": {"capability": (7, 5)}}, WARN, "compute capability 7.5", "8.0 and later"),
    ("GPU", {"gpu": {"capability": (8, 0)}}, PASS, "compute capability 8.0", None),
    ("GPU", {"gpu": {"capability": (10, 0)}}, PASS, "compute capability 10.0", None),
    ("GPU memory", {"gpu": {"free_bytes": 60 * GiB}}, WARN, "60 GiB free of 140 GiB", "Something else uses this GPU"),
    ("GPU memory", {"gpu": {"free_bytes": 70 * GiB}}, PASS, "70 GiB free of 140 GiB", None),
    # the link
    ("copies", {"link": Link("no memory")}, FAIL, "not measured: no memory", RAISE),
    ("PCIe", {"link": {"pcie_width": 8}}, WARN, "generation 5 x8, of generation 5 x16", "check the slot"),
    ("PCIe", {"link": {"pcie_generation": 3}}, WARN, "generation 3 x16, of generation 5 x16", "check the slot"),
    ("PCIe", {"link": {"pcie_generation": None}}, PASS, "the driver does not say", None),
    ("PCIe", {"link": {"pcie_most_generation": None, "pcie_most_width": None}}, PASS, "generation 5 x16", None),
    ("copy to the GPU", {"link": {"h2d_gbs": 26.1}}, WARN, "26.1 GB/s, of 63 that the link carries", "NUMA node"),
    ("copy from the GPU", {"link": {"d2h_gbs": 12.0}}, WARN, "12 GB/s, of 63 that the link carries", "NUMA node"),
    (
        "copy to the GPU",
        {"link": {"h2d_gbs": 12.0, "pcie_width": 4, "pcie_most_width": 4}},
        PASS,  # it is all that such a link has
        "12 GB/s",
        None,
    ),
    ("copy to the GPU", {"link": Link(h2d_gbs=3.0)}, PASS, "3 GB/s", None),  # the driver says nothing of the link
    ("copy from the GPU", {"link": {"d2h_gbs": None}}, WARN, "0 GB/s", "NUMA node"),
    ("both ways at once", {"link": {"both_gbs": 58.0}}, WARN, "58 GB/s together", "offloading hides less"),
    ("small copy", {"link": {"latency_us": 81.0}}, WARN, "81 µs", "slow to submit work"),
    # reads in place
    ("reads in place", {"reads": Reads("no compiler")}, FAIL, "not measured: no compiler", "Triton .* C compiler"),
    ("reads in place", {"reads": {"sequential_gbs": 20.0}}, WARN, "20 GB/s in order", "close what else uses the GPU"),
    ("translation reach", {"reads": rates()}, PASS, "not measured at rows of 256 bytes", None),
    ("translation reach", {"reads": rates((MiB, 50.0), (GiB, 45.0))}, PASS, "beyond 1 GiB: .* within 80% of", None),
    ("translation reach", {"reads": rates((MiB, 50.0), (GiB, 10.24))}, PASS, "1 MiB; from larger .* 40 million", None),
    ("translation reach", {"reads": rates((MiB, 20.0), (GiB, 9.0))}, WARN, "20 GB/s at best from 1 MiB", "probe again"),
    # compute
    ("compute", {"compute": Compute("out of memory")}, WARN, "not measured: out of memory", "--refresh"),
    *(
        (
            name,
            {"compute": {field: usual / 2}},
            WARN,
            f"{usual / 2:.4g} .*, where this GPU usually has {usual:.4g}",
            "capped",
        )
        for name, field, usual in (
            ("fp32 matrix product", "fp32_tflops", 50.0),
            ("tf32 matrix product", "tf32_tflops", 400.0),
            ("bf16 matrix product", "bf16_tflops", 675.0),
            ("GPU memory copy", "hbm_gbs", 4300.0),
        )
    ),
    # host memory
    ("memory", {"host": {"available_bytes": 12 * GiB}}, WARN, "12 GiB available of 125 GiB", "stop what else uses"),
    ("memory copy", {"host": Host(absent="too little")}, WARN, "not measured: too little", "--refresh"),
    ("lockable memory", {"host": {"lockable_bytes": FEW}}, FAIL, "lockable memory is 64 KiB", RAISE),
    ("lockable memory", {"host": {"lockable_bytes": 8 * MiB}}, FAIL, "lockable memory is 8 MiB", RAISE),
    ("lockable memory", {"host": {"lockable_bytes": FEW}, **NO_GPU}, WARN, "lockable memory is 64 KiB", RAISE),
    ("lockable memory", {"host": {"lockable_bytes": 4 * GiB}}, WARN, "lockable memory is 4 GiB", RAISE),
    ("lockable memory", {"host": {"lockable_bytes": 63 * GiB}}, PASS, "63 GiB", None),
    (
        "lockable memory",
        {"host": {"lockable_bytes": FEW, "lock_exempt": True}},
        PASS,
        r"64 KiB, which does not bind this process \(CAP_IPC_LOCK\)",
        None,
    ),
    (
        "lockable memory",
        {"host": {"lockable_bytes": FEW, "limit_ignored": True}},
        WARN,
        "lockable memory is 64 KiB; this driver page-locked more, others refuse$",
        RAISE,
    ),
    # the disk
    (
        "directory",
        {"disk": Disk(absent="No such file or directory", directory="/nowhere")},
        FAIL,
        "/nowhere: No such file or directory",
        ELSEWHERE,
    ),
    (
        "directory",
        {"disk": Disk(absent="only 1 MiB are free", directory="/full", kind="disk", name="ext4", free_bytes=MiB)},
        FAIL,
        r"/full \(ext4\): only 1 MiB are free",
        ELSEWHERE,
    ),
    ("directory", {"disk": {"kind": "memory", "name": "tmpfs"}}, WARN, "tmpfs. is memory, and no disk", ELSEWHERE),
    ("directory", {"disk": {"kind": "overlay", "name": "overlay"}}, WARN, "is a container's overlay", ELSEWHERE),
    ("directory", {"disk": {"kind": "network", "name": "nfs4"}}, WARN, "nfs4. is a network share", ELSEWHERE),
    ("direct I/O", {"disk": {"direct": False, "absent": "it is not in force"}}, WARN, "it is not in force", ELSEWHERE),
    ("free", {"disk": {"free_bytes": 9 * GiB}}, WARN, "9 GiB", "Little is left.*" + ELSEWHERE),
    ("free", {"disk": {"free_bytes": 10 * GiB}}, PASS, "10 GiB", None),
    ("free", {"disk": {"free_bytes": None}}, PASS, "unknown", None),
    ("write", {"disk": {"rates": (DiskRate(1, MiB, 0.3, 2.0),)}}, WARN, "0.3 GB/s at best .1 thread,", ELSEWHERE),
    ("read", {"disk": {"rates": (DiskRate(4, MiB, 3.0, 0.25),)}}, WARN, "0.25 GB/s at best .4 threads,", ELSEWHERE),
    ("cuFile", {"disk": {"cufile": "direct"}}, PASS, "works, from disk to GPU without the host", None),
    ("cuFile", {"disk": {"cufile": None, "cufile_absent": "no"}}, PASS, "not in use: no; freight goes through", None),
]


@pytest.mark.parametrize(
    ("name", "change", "verdict", "value", "remedy"), CASES, ids=[f"{case[0]}: {case[3]}"[:60] for case in CASES]
)
def test_each_line(h200: Machine, name: str, change: dict, verdict: str, value: str, remedy: str | None) -> None:
    finding = line(changed(h200, **change), name, usual=h200)
    assert finding.verdict == verdict
    assert re.search(value, finding.value), finding.value
    if remedy is None:
        assert finding.remedy is None
    else:
        assert re.search(remedy, finding.remedy or ""), finding.remedy


def test_a_cache_that_cannot_be_written(h200: Machine) -> None:
    finding = line(h200, "cache", cache_problem="/home is not writable")
    assert (finding.verdict, finding.value) == (WARN, "what is measured is not kept: /home is not writable")
    assert "FREIGHT_CACHE_DIR" in (finding.remedy or "")


def test_a_gpu_with_64_kib_that_can_be_locked(h200: Machine) -> None:
    """What is seen where the driver heeds the limit: nothing was page-locked, so no copy and no read was measured."""
    refused = "cudaHostRegister refused 67108864 bytes at 0x7f: error 2, out of memory"
    machine = changed(h200, host={"lockable_bytes": 64 * KiB}, link=Link(refused), reads=Reads(refused))
    failed = {finding.name: finding for finding in judge(machine, usual=h200) if finding.verdict != PASS}
    assert sorted(failed) == ["copies", "lockable memory"]
    assert {finding.verdict for finding in failed.values()} == {FAIL}
    assert failed["copies"].value == f"not measured: {refused}"


def test_without_a_gpu_nothing_is_said_of_its_link_and_speed(h200: Machine) -> None:
    findings = judge(changed(h200, **NO_GPU))
    assert [finding.name for finding in findings if finding.group == "GPU and link"] == ["GPU"]
    assert "Compute" not in {finding.group for finding in findings}
    assert not any(finding.verdict == FAIL for finding in findings)


def test_a_gpu_that_freight_has_no_defaults_for_is_not_called_slow(h200: Machine) -> None:
    machine = changed(h200, compute=Compute(fp32_tflops=1.0, tf32_tflops=1.0, bf16_tflops=1.0, hbm_gbs=1.0))
    assert {finding.verdict for finding in judge(machine, usual=None) if finding.group == "Compute"} == {PASS}


def test_a_disk_that_is_not_there_gets_one_line(h200: Machine) -> None:
    findings = judge(changed(h200, disk=Disk(absent="No such file or directory", directory="/nowhere")))
    assert [finding.name for finding in findings if finding.group == "Disk"] == ["directory", "cache"]


some_bytes = st.none() | st.integers(0, 2**45)
rate = st.none() | st.floats(0, 1e5)
why = st.none() | st.just("it broke")


@given(
    link=st.builds(Link, why, *(st.none() | st.integers(0, 20),) * 4, rate, rate, rate, rate),
    reads=st.builds(
        Reads,
        why,
        rate,
        st.lists(
            st.builds(
                RandomRead,
                st.sampled_from([MiB, GiB, 8 * GiB]),
                st.sampled_from([64, 256, 64 * KiB]),
                st.floats(0, 1e5),
            ),
            max_size=4,
        ).map(tuple),
    ),
    gpu=st.builds(Gpu, why, st.booleans(), capability=st.none() | st.just((9, 0)), free_bytes=some_bytes),
    host=st.builds(Host, why, available_bytes=some_bytes, lockable_bytes=some_bytes, memcpy_gbs=rate),
    disk=st.builds(
        Disk, why, kind=st.none() | st.sampled_from(["disk", "memory", "odd"]), direct=st.none() | st.booleans()
    ),
    software=st.builds(Software, st.just("3.12"), st.sampled_from(["2.11", "main", "2.x.y"]), driver=why),
)
def test_any_facts_can_be_judged(h200: Machine, **parts: Any) -> None:
    """Facts from a file may lack anything; a remedy stands beside each warning and failure, and nowhere else."""
    for finding in judge(changed(h200, **parts), usual=h200):
        assert finding.verdict in (PASS, WARN, FAIL)
        assert (finding.remedy is None) == (finding.verdict == PASS)
        assert finding.name
        assert finding.value
