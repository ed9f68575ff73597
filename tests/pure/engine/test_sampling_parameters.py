"""Tests of everything that is derived from the declaration of a sampling parameter, from the request field to a column
of the sampler.
"""

import pytest

from engine.core.types import Arrival, Batch, Row, Sampling
from engine.errors import InvalidRequest
from engine.executors.slots import Choices, Slots
from engine.link.messages import RANGES, ModelBounds, pack_sampling, unpack_sampling
from engine.ops.sampling_rows import ROW
from engine.sampling_parameters import PARAMETERS
from engine.wire import parse_request

each = pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)


def asked(key, value):
    return parse_request({"req_id": "x", "text": "x", key: value}).parameters


@each
def test_a_value_of_a_request_is_in_the_column_of_its_slot(parameter):
    """Through the message to the engine, by the name of each protocol."""
    for key in (parameter.field, *parameter.aliases):
        sampling = Sampling(4, **vars(asked(key, parameter.type(parameter.high))))
        sampling = unpack_sampling(pack_sampling(sampling), ModelBounds())
        slots = Slots(2, 4, 4, 16)
        batch = Batch([Row(1, 0, [3])], [Arrival(1, [3], 1, sampling)])
        slots.place(batch)
        rows = slots.sampling_rows(Choices.of(batch))
        assert getattr(rows, parameter.name).tolist() == pytest.approx([parameter.high], rel=1e-6)


@each
def test_the_neutral_value_is_within_the_limits(parameter):
    assert parameter.low <= parameter.neutral <= parameter.high
    assert parameter.low <= parameter.default <= parameter.high
    assert getattr(Sampling(4), parameter.name) == parameter.neutral
    assert RANGES[parameter.name] == (parameter.low, parameter.high)


@each
def test_a_value_beyond_the_limits_is_refused_with_field_and_value(parameter):
    beyond = [parameter.low - 1 - (parameter.off is not None)]
    beyond += [] if parameter.is_clipped else [parameter.high + 1]
    for value in beyond:
        with pytest.raises(InvalidRequest) as raised:
            asked(parameter.field, value)
        assert raised.value.field == parameter.field
        assert str(value) in str(raised.value)


def test_the_columns_of_parameters_come_first_in_a_row():
    assert [name for name in ROW.names if name in {each.name for each in PARAMETERS}] == [p.name for p in PARAMETERS]
