"""The model of a device: lanes in order, events between them, and nothing before it is asked for."""

import pytest
import torch

from freight import _cuda
from freight.errors import UnsupportedError
from freight.memory import CopyStreams, ModelDevice
from freight.memory._devices import CudaDevice


def test_lanes_keep_their_order_and_wait_for_each_other() -> None:
    device, done = ModelDevice(eager=False), []
    first = device.launch(lambda: done.append("first"))
    device.launch(lambda: done.append("second"))
    to = torch.zeros(1)
    copied = device.copy("to_host", [(to, torch.ones(1))], [first])
    device.hold(None, copied)
    last = device.launch(lambda: done.append("third"))
    assert not device.step("to_host")
    assert not device.done(first)
    device.synchronize(copied)
    assert (done, to.tolist()) == (["first"], [1.0])
    device.synchronize(last)
    assert done == ["first", "second", "third"]
    assert not any(device.step(lane) for lane in ("compute", "to_host", "to_device"))


def test_draining_a_lane_leaves_the_others() -> None:
    device = ModelDevice(eager=False)
    targets = [torch.zeros(1) for _ in range(3)]
    for to in targets[:2]:
        device.copy("to_host", [(to, torch.ones(1))], [device.now()])
    device.copy("to_device", [(targets[2], torch.ones(1))], [])
    device.drain("to_host")
    assert [to.item() for to in targets] == [1, 1, 0]
    device.drain("to_host")


def test_an_eager_device_is_never_behind() -> None:
    device, to = ModelDevice(), torch.zeros(1)
    assert device.done(device.copy("to_host", [(to, torch.ones(1))], [device.now()]))
    assert to.item() == 1


def test_what_it_owns_goes_by_storage() -> None:
    device = ModelDevice()
    mine = device.own(torch.zeros(10))
    assert device.is_mine(mine[3:5])
    assert not device.is_mine(torch.zeros(10))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_that_was_asked_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a copy stream needs a GPU and torch sees none"):
        CopyStreams("cuda")
    with pytest.raises(UnsupportedError):
        CudaDevice()
    assert not _cuda.available()
