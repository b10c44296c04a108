"""The state machine of ZeRO-3's streamed parameters, and what they are gathered from, without processes."""

from __future__ import annotations

import pytest
import torch
from deepc.errors import DeepcError, UnitStateError
from deepc.zero.parameters.param import FlatUnit, NodeParameter, Released, UnitState, set_data, share, version_of
from deepc.zero.sources import NodeSource, Piece
from torch import nn

STEPS = ["begin", "finish", "drop", "outdate", "reshard"]
NEXT = {
    UnitState.SHARDED: {"begin": UnitState.ARRIVING},
    UnitState.ARRIVING: {"finish": UnitState.UNSHARDED, "drop": UnitState.STALE},
    UnitState.UNSHARDED: {"reshard": UnitState.SHARDED, "outdate": UnitState.STALE},
    UnitState.STALE: {"begin": UnitState.ARRIVING, "reshard": UnitState.SHARDED},
}
WAY = {
    UnitState.SHARDED: ["reshard"],
    UnitState.ARRIVING: ["begin"],
    UnitState.UNSHARDED: ["begin", "finish"],
    UnitState.STALE: [],
}


class Owner:
    """Refuses every touch."""

    def touched(self, p, func):
        raise LookupError(getattr(func, "__name__", func))

    def settle(self):
        pass


def make(persistent: bool = False) -> FlatUnit:
    """A unit of a matrix, a scalar, and an empty vector; STALE, as made."""
    params = [nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0))]
    for p in params:
        share(p)
        p._deepc_owner = Owner()
    shapes = [tuple(p.shape) for p in params]
    return FlatUnit(7, "blocks.2", params, shapes, torch.empty(0), frozenset([id(params[0])]), persistent)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", UnitState)
def test_every_step_from_every_state(state, step):
    unit = make()
    for before in WAY[state]:
        getattr(unit, before)()
    assert unit.state is state
    if step in NEXT[state]:
        getattr(unit, step)()
        assert unit.state is NEXT[state][step]
    else:
        with pytest.raises(UnitStateError, match=f"unit 7 'blocks.2': {state.value}.* can't {step}"):
            getattr(unit, step)()
        assert unit.state is state
    assert unit.live == (unit.storage.nbytes() > 0) == (unit.state is not UnitState.SHARDED)
    assert unit.ready == (unit.state is UnitState.UNSHARDED)
    assert issubclass(UnitStateError, DeepcError)


def test_parameters_are_released_unless_the_unit_is_in_use():
    unit = make()
    matrix, scalar, nothing = unit.params
    assert unit.offsets == [0, 64, 128] and unit.elems == 16 and unit.flat.numel() == 128
    assert [p.shape for p in unit.params] == [(3, 5), (), (0,)] and unit.place(scalar) == 1
    unit.reshard()
    assert all(isinstance(p, Released) for p in unit.params)
    unit.begin()
    unit.flat.zero_()
    unit.finish()
    assert all(isinstance(p, Released) for p in unit.params), "it may go at any moment"
    with pytest.raises(LookupError):
        matrix + 1
    unit.use()
    unit.use()
    assert type(matrix) is type(scalar) is type(nothing) is NodeParameter
    assert torch.equal(matrix + 1, torch.ones(3, 5))
    with pytest.raises(UnitStateError, match="in use"):
        unit.reshard()
    unit.unuse()
    assert type(matrix) is NodeParameter
    unit.unuse()
    assert isinstance(matrix, Released)
    with pytest.raises(UnitStateError, match="no user"):
        unit.unuse()
    unit.reshard()
    with pytest.raises(UnitStateError, match="sharded.* can't use"):
        unit.use()


def test_a_persistent_unit_stays():
    unit = make(persistent=True)
    unit.begin()
    unit.finish()
    assert type(unit.params[0]) is NodeParameter
    unit.use()
    unit.unuse()
    assert type(unit.params[0]) is NodeParameter
    with pytest.raises(UnitStateError, match="persistent"):
        unit.reshard()


def test_a_unit_says_what_it_is():
    unit = make()
    unit.begin()
    unit.finish()
    unit.use()
    assert repr(unit) == "<unit 7 'blocks.2': unsharded, 1 use, 3 parameters of 16 elements>"


def test_who_refers_to_a_storage_is_seen():
    unit = make()
    assert not unit.referred
    view = unit.flat[:2]
    assert unit.referred
    del view
    assert not unit.referred


def test_gathers_from_the_node_fill_the_same_views():
    unit, source = make(), NodeSource()
    home = torch.arange(64.0)
    values = [home[:15], home[20:21], home[30:30]]
    source.add(unit, [[Piece(0, 0, v.numel(), v)] for v in values])
    unit.reshard()
    matrix, scalar, _ = unit.params
    version = version_of(matrix)
    for _ in range(2):
        unit.begin()
        source.begin([unit])
        source.complete(unit)
        unit.finish()
        unit.use()
        assert torch.equal(matrix.detach().view(-1), home[:15]) and scalar.item() == home[20].item()
        assert version_of(matrix) == version, "a gather is no write"
        unit.unuse()
        unit.reshard()
        home += 1
    source.write(unit, 1, torch.tensor([5.0]))
    assert home[20] == 5.0 and source.read(unit, 1).item() == 5.0 and source.close()


def test_released_parameters_take_data_from_their_owner():
    unit = make()
    unit.reshard()
    matrix = unit.params[0]
    with pytest.raises(LookupError):
        matrix.data = torch.ones(3, 5)
    set_data(matrix, torch.ones(3, 5))
    assert isinstance(matrix, Released) and matrix.shape == (3, 5)
