"""Whether cuFile works is tried in a process of its own, whose end, however it comes, is no more than an answer."""

import os
from pathlib import Path

import pytest

from freight.machine import _cufile


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program of the test's own in the place of the trial, and gives what `check` makes of it."""
    for name in ("disk", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(_cufile, "_loaded_library", lambda: "libcufile.so.0")

    def run(code: str) -> tuple[str | None, str | None]:
        program = tmp_path / "program.py"
        program.write_text(code)
        with monkeypatch.context() as patched:
            patched.setattr(_cufile, "__file__", str(program))
            answer = _cufile.check(tmp_path / "disk", gpu=True)
        for name in ("disk", "here"):  # whatever the trial wrote
            assert list((tmp_path / name).iterdir()) == []
        return answer

    return run


def test_it_works(trial) -> None:
    how = "direct" if os.path.exists("/proc/driver/nvidia-fs") else "compatible"
    assert trial("open('cufile.log', 'w').write('noise'); print('noise'); print('ok')") == (how, None)


def test_the_trial_gets_the_library_and_a_file_on_that_disk(trial) -> None:
    works, why_not = trial("import sys; print(sys.argv[1], sys.argv[2])")
    library, file = (why_not or "").split(" ")
    assert (works, library) == (None, "libcufile.so.0")
    assert Path(file).parent.parent.name == "disk"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('cuFileHandleRegister failed with error 5008')", "cuFileHandleRegister failed with error 5008"),
        ("print('ok'); raise SystemExit(3)", "ok"),  # what it said is told, and it does not count as working
        ("raise SystemExit(3)", "the trial ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "the trial ended with status -11"),
        ("pass", "the trial ended with status 0"),
        (r"import os; os.write(1, b'\xff\xfe failed\n')", "\ufffd\ufffd failed"),
    ],
)
def test_it_does_not_work(trial, code: str, reason: str) -> None:
    assert trial(code) == (None, reason)


def test_a_trial_that_hangs_is_ended(trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cufile, "_SECONDS", 0.3)
    assert trial("import threading; threading.Event().wait()") == (None, "a round trip did not end within 0.3 s")


def test_what_is_not_even_tried(tmp_path: Path, unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _cufile.check(tmp_path, gpu=False) == (None, "there is no GPU")
    monkeypatch.setattr(_cufile, "_loaded_library", lambda: None)
    assert _cufile.check(tmp_path, gpu=True) == (None, "torch has not loaded libcufile")
    monkeypatch.setattr(_cufile, "_loaded_library", lambda: "libcufile.so.0")
    works, why_not = _cufile.check(unwritable, gpu=True)
    assert works is None
    assert (why_not or "").startswith("it could not be tried: ")


@pytest.mark.skipif("libcufile" in Path("/proc/self/maps").read_text(), reason="torch brings libcufile here")
def test_no_library_is_loaded_here() -> None:
    assert _cufile._loaded_library() is None


def test_the_library_is_found_where_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n"
        "7f0000002000-7f0000003000 r-xp 00000000 08:01 2 /opt/nvidia/cu13/lib/libcufile.so.0\n"
        "7f0000004000-7f0000005000 r-xp 00000000 08:01 3 /opt/nvidia/cu13/lib/libcufile_rdma.so.1\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert _cufile._loaded_library() == "/opt/nvidia/cu13/lib/libcufile.so.0"


def test_the_program_itself_says_why_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one, with a library that does not exist: it ends with an error, and so does not work."""
    monkeypatch.setattr(_cufile, "_loaded_library", lambda: str(tmp_path / "libcufile.so.0"))
    works, why_not = _cufile.check(tmp_path, gpu=True)
    assert works is None
    assert why_not == "the trial ended with status 1"
    assert list(tmp_path.iterdir()) == []
